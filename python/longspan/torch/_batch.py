"""A batch for training whose tokens are sharded, and its loss.

    loss of a rank = factor * sum over its tokens of cross_entropy / valid tokens of all ranks

The sum of the ranks' losses is the mean over all valid tokens, and the sum of the ranks' gradients is its gradient.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from longspan import InputError, Sharding

from ._groups import _finish, _group_of, default_deadline, known, name_of
from ._layouts import layout_text, shard_of


class ShardedBatch(NamedTuple):
    """A rank's part of a batch; shard_batch makes it.

    >>> import torch, longspan.torch
    >>> batch = longspan.torch.shard_batch(torch.tensor([[5, 6, 7]]), torch.tensor([[5, 6, 7]]))
    >>> batch.labels, int(batch.valid_tokens)
    (tensor([[   6,    7, -100]]), 2)
    """

    input_ids: Tensor  # [batch, own tokens]
    labels: Tensor | None  # [batch, own tokens]: the token that follows; ignore_index where none is learned
    position_ids: Tensor  # [batch, own tokens] int64: in its document where there are documents, else in the sequence
    documents: Tensor | None  # as given, of whole sequences, for attention
    layout: str  # as attention and context_parallel take it
    total_tokens: int  # of a whole sequence
    valid_tokens: Tensor  # int64: labels that are learned, of all ranks and data-parallel replicas
    ignore_index: int

    def loss(self, logits: Tensor, *, averaged_over: int = 1) -> Tensor:
        """This rank's part of the mean cross-entropy of all valid tokens: a float32 scalar.

        The loss is the sum of the parts over all ranks, and so is the gradient of each weight. Without labels
        that are learned it is 0, and so are the gradients.

        Args:
            logits: [batch, own tokens, vocabulary], of the model on input_ids; any floating type.
            averaged_over: how many ranks average their gradients afterwards: those of the process group of
                DistributedDataParallel, or of the mesh of fully_shard, which divide sums by their number. 1 where
                gradients are summed.

        Raises:
            InputError: there are no labels; logits of another shape; averaged_over below 1.
        """
        if self.labels is None:
            raise InputError("the batch has no labels; give them to shard_batch")
        if logits.shape[:-1] != self.labels.shape:
            raise InputError(f"logits is {list(logits.shape)}; the labels of this rank are {list(self.labels.shape)}, so "
                             f"{[*self.labels.shape, 'vocabulary']} is wanted")
        if averaged_over < 1:
            raise InputError(f"averaged_over is {averaged_over}; a number of ranks is wanted")
        total = torch.nn.functional.cross_entropy(logits.flatten(0, -2).float(), self.labels.flatten(),
                                                  ignore_index=self.ignore_index, reduction="sum")
        return total * (averaged_over / self.valid_tokens.clamp(min=1))


def shard_batch(input_ids: Tensor, labels: Tensor | None = None, *, group: Any = None, comm: Any = None,
                layout: str | Sharding = "zigzag", position_ids: Tensor | None = None, documents: Tensor | None = None,
                data_group: Any = None, shift_labels: bool = True, ignore_index: int = -100) -> ShardedBatch:
    """This rank's tokens of a batch that all ranks of `group` have whole.

    Labels are shifted before they are sharded, since the token after a rank's last one may lie on another rank.
    The last token of a sequence, and of a document, predicts nothing. Communicates only with a data_group.

    Args:
        input_ids: [batch, tokens] of any type, the same on all ranks of the group.
        labels: [batch, tokens] int64. None: the batch has no loss.
        group, comm: the ranks of a sequence, as in scaled_dot_product_attention.
        layout: how tokens are dealt out, as context_parallel's.
        position_ids: [tokens] or [batch, tokens] of whole sequences. None counts from 0, in each document anew.
        documents: [count + 1] or [batch, count + 1] int64 starts of packed documents and their end, as
            scaled_dot_product_attention takes them.
        data_group: a ProcessGroup, or a DeviceMesh of one dimension, of ranks that have other batches for the same
            step: the loss is then divided by the valid tokens of all of them. Collective over it.
        shift_labels: labels[:, i] is token i, as transformers counts, and token i - 1 predicts it. False: labels[:, i]
            is what token i predicts.
        ignore_index: of labels that are not learned.

    Raises:
        InputError: shapes that do not fit, or documents that are not ascending starts within the sequence.
        TypeError: not a tensor. UsageError: this rank is not of the group. RankError: a rank of data_group did not come.

    >>> import torch, longspan.torch
    >>> ids = torch.arange(6)[None]
    >>> batch = longspan.torch.shard_batch(ids, ids, documents=torch.tensor([0, 4, 6]))
    >>> batch.labels
    tensor([[   1,    2,    3, -100,    5, -100]])
    >>> batch.position_ids
    tensor([[0, 1, 2, 3, 0, 1]])
    >>> batch.loss(torch.zeros(1, 6, 8))      # log 8
    tensor(2.0794)
    """
    if not isinstance(input_ids, Tensor):
        raise TypeError(f"input_ids is of type '{type(input_ids).__name__}'; a tensor is wanted")
    if input_ids.dim() != 2:
        raise InputError(f"input_ids is {list(input_ids.shape)}; [batch, tokens] is wanted: unsqueeze(0) makes a batch of one")
    batch, tokens = input_ids.shape
    starts = None if documents is None else _starts(documents, batch, tokens)
    if position_ids is None:
        position_ids = torch.arange(tokens, device=input_ids.device).expand(batch, tokens)
        if starts is not None:
            position_ids = position_ids - _first_of_each(starts, tokens).to(input_ids.device)
    else:
        _check("position_ids", position_ids, batch, tokens, also=(tokens,))
        position_ids = position_ids.expand(batch, tokens)
    if labels is not None:
        _check("labels", labels, batch, tokens)
        if labels.dtype != torch.int64:
            raise InputError(f"labels is {labels.dtype}; torch.int64 is wanted")
        if shift_labels:
            labels = _shifted(labels, starts, ignore_index)
    valid = torch.zeros((), dtype=torch.int64, device=input_ids.device) if labels is None else (labels != ignore_index).sum()
    if data_group is not None:
        valid = _sum_over(valid, data_group)
    world, layout = known(name_of(comm, group, input_ids.device.type)), layout_text(layout, "layout")

    def own(whole: Tensor) -> Tensor:
        return shard_of(whole, layout, world.rank, world.size, 1)

    return ShardedBatch(own(input_ids), None if labels is None else own(labels), own(position_ids), documents, layout, tokens,
                        valid, ignore_index)


def _check(name: str, tensor: Any, batch: int, tokens: int, also: tuple[int, ...] | None = None) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is of type '{type(tensor).__name__}'; a tensor is wanted")
    if tuple(tensor.shape) not in ((batch, tokens), also):
        raise InputError(f"{name} is {list(tensor.shape)}; input_ids is {[batch, tokens]}, and they are alike")


def _starts(documents: Tensor, batch: int, tokens: int) -> Tensor:
    """[batch or 1, count + 1] on the CPU."""
    if not isinstance(documents, Tensor):
        raise TypeError(f"documents is of type '{type(documents).__name__}'; a tensor is wanted")
    if documents.dtype not in (torch.int64, torch.int32):
        raise InputError(f"documents is {documents.dtype}; torch.int64 is wanted")
    starts = documents[None] if documents.dim() == 1 else documents
    if starts.dim() != 2 or len(starts) not in (1, batch) or (documents.dim() == 1 and batch > 1) or starts.shape[1] == 0:
        raise InputError(f"documents is {list(documents.shape)}; the batch has {batch} sequences: [batch, count + 1] "
                         "is wanted, or [count + 1] for one")
    starts = starts.detach().cpu()
    ascending = (starts[:, 1:] >= starts[:, :-1]).all() and (starts >= 0).all() and (starts <= tokens).all()
    if not ascending:
        raise InputError(f"documents is {starts.tolist()}; starts ascend from 0, or from the first token that is no padding, to "
                         f"at most {tokens}, the end of the sequence")
    return starts


def _first_of_each(starts: Tensor, tokens: int) -> Tensor:
    """[batch, tokens]: the first token of each token's document. Tokens outside all documents count from the last
    document's end, or from 0."""
    at = torch.arange(tokens, device="cpu").expand(len(starts), tokens).contiguous()
    place = torch.searchsorted(starts.contiguous(), at, right=True) - 1
    return torch.where(place >= 0, starts.gather(1, place.clamp(min=0)), 0)


def _shifted(labels: Tensor, starts: Tensor | None, ignore_index: int) -> Tensor:
    """What each token predicts: the next one of its document."""
    shifted = torch.full_like(labels, ignore_index)
    shifted[:, :-1] = labels[:, 1:]
    if starts is not None:
        tokens = labels.shape[1]
        first = _first_of_each(starts, tokens)
        ends = torch.zeros(len(starts), tokens, dtype=torch.bool, device="cpu")
        place = torch.arange(tokens, device="cpu")
        ends[:, :-1] = first[:, 1:] != first[:, :-1]
        outside = (place < starts[:, :1]) | (place >= starts[:, -1:])
        shifted = shifted.masked_fill((ends | outside).to(labels.device), ignore_index)
    return shifted


def _sum_over(count: Tensor, data_group: Any) -> Tensor:
    group, _ = _group_of(data_group, None)
    if group is None:
        return count
    total = count.clone()
    work = torch.distributed.all_reduce(total, group=group, async_op=True)
    if total.device.type == "cuda":
        work.wait()  # of the stream, not of this thread
    else:
        _finish(work, default_deadline(), "sum of valid tokens")
    return total
