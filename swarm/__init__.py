"""How volunteers train a recipe together over a Hivemind DHT."""
