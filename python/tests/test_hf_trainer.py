"""transformers' Trainer over sharded sequences: the losses of one process, by accelerate, on gloo ranks."""

import functools

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.17")
pytest.importorskip("accelerate")

import longspan
import numpy as np
import torch
import trainer_jobs as jobs
import transformers
from device import DEVICE
from longspan.hf._trainer import _Loader as Loader

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="accelerate is told to use the CPU")


@functools.cache
def of_one_process(kind, batch):
    return jobs.losses(kind, batch)


def of_transformers(kind, batch):
    """Trainer as it is, with transformers' own attention, on the same batches."""
    class Plain(transformers.Trainer):
        def get_train_dataloader(self):
            sampler = torch.utils.data.DistributedSampler(self.train_dataset, 1, 0, seed=self.args.seed)
            return Loader(self.train_dataset, batch, collate_fn=self.data_collator, sampler=sampler)

    made = jobs.trainer(kind, batch, Plain)
    made.model.set_attn_implementation("sdpa")
    made.train()
    return [[log["loss"], float(log["grad_norm"])] for log in made.state.log_history if "loss" in log]


def test_one_process_is_transformers_own():
    wanted = of_transformers("equal", 4)
    np.testing.assert_allclose(of_one_process("equal", 4)[:-1], wanted, rtol=1e-5)
    np.testing.assert_allclose(jobs.losses("equal", 4, dataloader_num_workers=1)[:-1], wanted, rtol=1e-5)


@pytest.mark.parametrize("kind, ranks, options", [
    ("equal", 4, dict(gradient_checkpointing=True)), ("padded", 2, dict()), ("flattened", 2, dict())])
def test_ranks(torch_ranks, kind, ranks, options):
    """Four ranks: one group of four, or two of two, which have other samples. The same batches, half by each."""
    batch = 4 * ranks // 4
    wanted = of_one_process(kind, 4)
    if kind == "flattened":  # an odd number of documents in each batch; one process has those of both groups
        wanted = of_one_process("padded", 4)
    for found in torch_ranks.values(4, jobs.losses_of_ranks, kind, batch, ranks, options):
        np.testing.assert_allclose(np.hstack(found), np.hstack(wanted), rtol=2e-5)


def test_resume(torch_ranks, tmp_path):
    """A checkpoint in the middle of an epoch: the losses that follow are those of a run that was not interrupted."""
    wanted = np.hstack(of_one_process("padded", 4)[1:3])
    for found in torch_ranks.values(4, jobs.resumed_losses, "padded", 2, 2, str(tmp_path)):
        np.testing.assert_allclose(np.hstack(found), wanted, rtol=2e-5)


def test_accelerates_own_context(torch_ranks):
    torch_ranks.values(2, jobs.accelerates_own_context)


def test_models_of_flash_attention_2(torch_ranks):
    """ring-flash-attention's adapter of transformers."""
    torch_ranks.values(2, jobs.models_of_flash_attention_2)


def test_refusals():
    def loader(**options):
        return jobs.raised(lambda: jobs.trainer("equal", 2, **options).get_train_dataloader())

    assert "label_smoothing_factor" in loader(label_smoothing_factor=0.1)
    assert "average_tokens_across_devices" in loader(average_tokens_across_devices=False)
    assert loader() is None
    made = jobs.trainer("equal", 2)
    made.model_accepts_loss_kwargs = False
    assert "without loss kwargs" in jobs.raised(made.get_train_dataloader)
    made = jobs.trainer("equal", 2)
    assert "token_type_ids" in jobs.raised(lambda: made._own({"input_ids": torch.zeros(1, 4), "token_type_ids": torch.zeros(1, 4)}))
    assert "prediction_loss_only" in jobs.raised(lambda: made.predict(made.eval_dataset) if not setattr(
        made.args, "prediction_loss_only", False) else None)
    with pytest.raises(longspan.InputError, match="token 1 has the number -1 between"):
        made._own({"input_ids": torch.zeros(1, 4, dtype=torch.int64), "attention_mask": torch.tensor([[1, 0, 1, 1]])})
