"""Few bytes a step and short exams, for tests of what `train lm` does with them."""

import pytest
import torch

from k3lite.tasks import lm, lm_job, lm_watch


def shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(lm, "TOKENS_PER_STEP", 1024)
    for name, value in (("EXAM_ROWS", 2), ("RECALL_LENGTHS", (128, 256)), ("RECALL_DOCUMENTS", 2)):
        monkeypatch.setattr(lm_job, name, value)
    for name in ("WATCH_ROWS", "WATCH_DOCUMENTS"):
        monkeypatch.setattr(lm_watch, name, 2)
