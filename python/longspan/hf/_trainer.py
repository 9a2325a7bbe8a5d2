"""transformers' Trainer over sequences that are sharded across ranks.

Trainer divides the sum of a rank's cross-entropies by the valid labels of all ranks, multiplies it by the number of ranks,
and DistributedDataParallel averages gradients. So a rank that has its own tokens, and labels that were shifted before they
were sharded, contributes its part of the mean over all tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import InputError, UnsupportedError, document_starts
from ..torch import communicator, context_parallel, shard_batch

_KNOWN = frozenset(("attention_mask", "labels", "input_ids", "position_ids", "documents", "shift_labels"))


class _Loader(torch.utils.data.DataLoader):
    """Tells its sampler the epoch, as Trainer tells it."""

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)


class ShardedTraining:
    """Makes a Trainer of transformers train on sequences that are sharded: every rank has its own tokens of each.

        class Trainer(longspan.hf.ShardedTraining, transformers.Trainer):
            pass

    Trainer's own loss, gradient accumulation, logging, evaluation of the loss and checkpoints stay as they are. The ranks
    of a sequence get the same batches; per_device_train_batch_size counts whole sequences of a group of ranks. A batch that
    the collator makes may have input_ids [batch, tokens], labels, position_ids, an attention_mask with padding on one
    side, and documents [batch, count + 1], the starts of packed documents. Position ids that begin again in a batch of one
    sequence, as DataCollatorWithFlattening makes them, are documents too.

    Attributes:
        sequence_group: a ProcessGroup, or a DeviceMesh of one dimension: the ranks that share sequences; None: all.
            Neighbouring ranks, as many in each group; groups have other batches.
        sequence_layout: how tokens are dealt out, as context_parallel's layout.

    Raises:
        UnsupportedError: by name, what Trainer computes from whole sequences: label_smoothing_factor, compute_metrics
            and predictions, average_tokens_across_devices=False, several GPUs of one process, accelerate's cp_size, other
            columns of a batch, an iterable dataset with several groups, models without loss kwargs.
    """

    sequence_group: Any = None
    sequence_layout = "zigzag"

    def get_train_dataloader(self) -> torch.utils.data.DataLoader:
        """Whole batches, the same on all ranks of a group."""
        if self.train_dataset is None:
            raise ValueError("Trainer: training requires a train_dataset.")
        return self._loader(self.train_dataset, self._train_batch_size, True)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> torch.utils.data.DataLoader:
        """The same for evaluation, in order."""
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]
        return self._loader(self.eval_dataset if eval_dataset is None else eval_dataset, self.args.eval_batch_size, False)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list, Any]:
        """This rank's parts of batches, and the valid labels of all ranks."""
        return super().get_batch_samples(map(self._own, epoch_iterator), num_batches, device)

    def training_step(self, model: torch.nn.Module, inputs: dict, *args: Any, **options: Any) -> Tensor:
        """Forward and backward inside context_parallel."""
        with self._context(inputs):
            return super().training_step(model, inputs, *args, **options)

    def prediction_step(self, model: torch.nn.Module, inputs: dict, prediction_loss_only: bool, ignore_keys: Any = None) -> tuple:
        """The loss; logits are of this rank's tokens, and are refused."""
        if not prediction_loss_only:
            raise UnsupportedError("logits of sharded sequences (compute_metrics, predict) are not supported by ShardedTraining: "
                                   "give prediction_loss_only=True to TrainingArguments")
        inputs = self._own(inputs)
        with self._context(inputs):
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    def _context(self, inputs: dict) -> Any:
        documents = inputs.pop("documents", None)
        return context_parallel(self.sequence_group, layout=self.sequence_layout, total_tokens=inputs.pop("total_tokens"),
                                documents=None if documents is None else documents.to(self.args.device))

    def _loader(self, dataset: Any, batch: int, training: bool) -> torch.utils.data.DataLoader:
        self._refuse_what_is_of_whole_sequences()
        args, comm = self.args, self._comm()
        groups, number = args.world_size // comm.size, args.process_index // comm.size
        if args.world_size % comm.size or args.process_index % comm.size != comm.rank:
            raise InputError(f"rank {args.process_index} of {args.world_size} is rank {comm.rank} of {comm.size} of "
                             "sequence_group; neighbouring ranks share sequences, and groups are of one size")
        sampler = None
        if not isinstance(dataset, torch.utils.data.IterableDataset):
            seed = args.seed if args.data_seed is None else args.data_seed
            sampler = torch.utils.data.DistributedSampler(dataset, groups, number, shuffle=training, seed=seed)
        elif groups > 1:
            raise UnsupportedError(f"an iterable dataset with {groups} groups of ranks is not supported by ShardedTraining: its parts "
                                   "cannot be told apart")
        return _Loader(dataset, batch, sampler=sampler, collate_fn=self.data_collator,
                       drop_last=training and args.dataloader_drop_last, num_workers=args.dataloader_num_workers,
                       pin_memory=args.dataloader_pin_memory)

    def _comm(self) -> Any:
        return communicator(self.sequence_group, device=self.args.device.type)

    def _own(self, batch: dict) -> dict:
        """This rank's part of a batch, with labels that are shifted."""
        for name in batch:
            if name not in _KNOWN and not name.startswith(("cu_seq_lens", "max_length")):
                raise UnsupportedError(f"{name} of a batch is not supported by ShardedTraining; input_ids, labels, position_ids, "
                                       "attention_mask and documents are")
        ids, positions, documents = batch["input_ids"], batch.get("position_ids"), batch.get("documents")
        mask = batch.get("attention_mask")
        if documents is None and mask is not None and not bool(mask.all()):
            documents = document_starts(torch.where(mask.bool(), 0, -1))
        elif documents is None and positions is not None and len(ids) == 1:
            documents = document_starts((positions == 0).cumsum(1))
        labels, shift = batch.get("labels"), "shift_labels" not in batch
        made = shard_batch(ids, labels if shift else batch["shift_labels"], comm=self._comm(), layout=self.sequence_layout,
                           position_ids=positions, documents=documents, shift_labels=shift)
        own = {"input_ids": made.input_ids, "position_ids": made.position_ids, "total_tokens": made.total_tokens}
        if made.labels is not None:
            own |= {"labels": made.labels, "shift_labels": made.labels}
        return own if documents is None else own | {"documents": documents}

    def _refuse_what_is_of_whole_sequences(self) -> None:
        args, accelerator = self.args, self.accelerator
        parallelism = getattr(accelerator, "parallelism_config", None)
        for wrong, what in (
                (args.label_smoothing_factor, "label_smoothing_factor, which shifts the labels itself,"),
                (not args.average_tokens_across_devices, "average_tokens_across_devices=False"),
                (args.n_gpu > 1, f"{args.n_gpu} GPUs in one process, for which a launcher makes a process each,"),
                (parallelism is not None and (parallelism.cp_enabled or parallelism.sp_enabled),
                 "a ParallelismConfig with cp_size or sp_size, which enters a context of its own,"),
                (not (self.model_accepts_loss_kwargs or self.compute_loss_func),
                 "a model without loss kwargs, whose loss is the mean of one rank's tokens,")):
            if wrong:
                raise UnsupportedError(f"{what} is not supported by ShardedTraining")
