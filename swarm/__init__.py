"""How volunteers train a recipe together over a Hivemind DHT."""

import warnings

# Hivemind compiles a function so when it is imported; nobody who trains can do anything about it.
warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", FutureWarning)
