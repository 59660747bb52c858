"""The metrics line of each update shows how long it took on a device that computes on by itself."""

from unittest.mock import Mock

import pytest
import torch

from recipe.training import callbacks
from recipe.training.callbacks import StepMetrics


class Clock:
    """A clock that stands still, except for the seconds that are slept."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(("device", "seconds"), [("cuda", 1.1), ("cpu", 0.1)])
def test_an_update_takes_as_long_as_the_gpu_computes_for_it(monkeypatch, device, seconds):
    """The host hands an update over in 0.1 s. A GPU then computes for another second."""
    clock = Clock()
    monkeypatch.setattr(callbacks, "time", clock)
    stream = Mock(synchronize=lambda: clock.sleep(1.0))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    metrics = {name: Mock(compute=lambda: torch.tensor(0.5)) for name in ("loss", "top1", "top5")}
    module, logger = Mock(device=torch.device(device), train_metrics=metrics), Mock()
    optimizer = Mock(param_groups=[{"lr": 0.1}])
    trainer = Mock(global_step=0, world_size=1, should_stop=False, loggers=[logger], optimizers=[optimizer])
    meter, batch = StepMetrics(), (None, torch.zeros(128))
    meter.on_train_start(trainer, module)
    for step in (1, 2, 3):
        meter.on_train_batch_start(trainer, module, batch, step - 1)
        clock.sleep(0.1)
        trainer.global_step = step
        meter.on_train_batch_end(trainer, module, None, batch, step - 1)
    lines = [call.args[0] for call in logger.log_metrics.call_args_list]
    assert [line["perf/step_seconds"] for line in lines] == pytest.approx([seconds] * 3)
    assert [line["perf/samples_per_second"] for line in lines] == pytest.approx([128 / seconds] * 3)
