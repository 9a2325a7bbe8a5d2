"""Jobs of test_hf_trainer.py: transformers' Trainer on one process, and on ranks of torch.distributed."""

import functools
import os
import tempfile

import accelerate
import torch
import torch.distributed as dist
import transformers
from accelerate.big_modeling import _attach_context_parallel_hooks
from accelerate.state import AcceleratorState, GradientState, PartialState

import longspan.hf
import longspan.torch as lt
from longspan import ring_flash_attn as ring

transformers.logging.set_verbosity_error()


def model(attention="longspan"):
    torch.manual_seed(0)
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=50,
        use_cache=False))
    made.set_attn_implementation(attention)
    return made


def samples(lengths):
    draw = torch.Generator().manual_seed(1)
    made = []
    for n in lengths:
        ids = torch.randint(0, 50, (n,), generator=draw)
        made.append({"input_ids": ids, "labels": torch.where(torch.rand(n, generator=draw) < 0.3, -100, ids)})
    return made


def padded(features):
    """A batch of samples of unequal lengths, padded on the right, with a mask."""
    most = max(len(one["input_ids"]) for one in features)

    def stack(name, fill):
        return torch.stack([torch.nn.functional.pad(one[name], (0, most - len(one[name])), value=fill) for one in features])

    return {"input_ids": stack("input_ids", 0), "labels": stack("labels", -100),
            "attention_mask": stack("input_ids", -1).ne(-1).long()}


def flattened(features):
    """One sequence, in which positions begin again."""
    return transformers.DataCollatorWithFlattening()([{n: t.tolist() for n, t in one.items()} for one in features])


COLLATORS = {"equal": None, "padded": padded, "flattened": flattened}


class Sharded(longspan.hf.ShardedTraining, transformers.Trainer):
    pass


def trainer(kind, batch, base=Sharded, **options):
    lengths = [24] * 12 if kind == "equal" else [9, 24, 17, 5, 24, 11, 20, 3, 8, 16, 13, 21]
    given = dict(output_dir=tempfile.gettempdir(), max_steps=3, per_device_train_batch_size=batch, per_device_eval_batch_size=batch,
                 gradient_accumulation_steps=2, learning_rate=1e-2, lr_scheduler_type="constant", logging_steps=1, report_to=[], save_strategy="no", use_cpu=True,
                 disable_tqdm=True, seed=3, prediction_loss_only=True, ddp_find_unused_parameters=False) | options
    return base(model=model(), args=transformers.TrainingArguments(**given), train_dataset=samples(lengths),
                eval_dataset=samples([16] * 4), data_collator=COLLATORS[kind])


def losses(kind, batch, group=None, **options):
    """[loss, norm of the gradient] of each step, and the loss of evaluation."""
    made = trainer(kind, batch, **options)
    made.sequence_group = group
    made.train()
    made.data_collator = transformers.default_data_collator
    found = made.evaluate()["eval_loss"]
    logs = [log for log in made.state.log_history if "loss" in log]
    return [*([log["loss"], float(log["grad_norm"])] for log in logs), found]


class Launched:
    """The variables that accelerate reads of a launcher, for a process group that is there already."""

    def __enter__(self):
        self.before = dict(os.environ)
        os.environ.update(RANK=str(dist.get_rank()), WORLD_SIZE=str(dist.get_world_size()), LOCAL_RANK=str(dist.get_rank()),
                          LOCAL_WORLD_SIZE=str(dist.get_world_size()), MASTER_ADDR="localhost", MASTER_PORT="1")

    def __exit__(self, *_):
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        os.environ.clear()
        os.environ.update(self.before)


def losses_of_ranks(world, kind, batch, ranks, options):
    groups = [dist.new_group(range(first, first + ranks)) for first in range(0, dist.get_world_size(), ranks)]
    with Launched():
        return losses(kind, batch, groups[dist.get_rank() // ranks], **options)


def resumed_losses(world, kind, batch, ranks, folder):
    """[loss, norm of the gradient] of the last two steps, in a run that goes on after the first."""
    groups = [dist.new_group(range(first, first + ranks)) for first in range(0, dist.get_world_size(), ranks)]
    with Launched():
        for resumes in (False, True):
            made = trainer(kind, batch, output_dir=folder, **({} if resumes else dict(save_strategy="steps", save_steps=1)))
            made.sequence_group = groups[dist.get_rank() // ranks]
            if not resumes:
                made.add_callback(Stops())
            made.train(resume_from_checkpoint=f"{folder}/checkpoint-1" if resumes else None)
        assert made.state.global_step == 3
        return [[log["loss"], float(log["grad_norm"])] for log in made.state.log_history if log["step"] > 1 and "loss" in log]


class Stops(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = state.global_step == 1


def raised(call):
    try:
        call()
    except (longspan.UnsupportedError, longspan.InputError) as error:
        return str(error)


def accelerates_own_context(group):
    """accelerate.Accelerator.maybe_context_parallel over longspan's context: it takes what that gives, and a model with
    accelerate's hooks has the gradients of the whole. On CPUs accelerate makes no such mesh, so one is put in its place."""
    class Parallelism:
        cp_backend, cp_enabled = "torch", True

    class Accelerator:
        parallelism_config = Parallelism()
        _cp_context = staticmethod(functools.partial(lt.context_parallel, mesh=dist.DeviceMesh.from_group(group, "cpu")))

    ids = samples([32])[0]["input_ids"][None]
    shifted = torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 1:].contiguous()
    right = model("sdpa")
    right(input_ids=ids, labels=ids, num_items_in_batch=torch.tensor(31)).loss.backward()
    own = model("sdpa")
    _attach_context_parallel_hooks(own)
    buffers = [ids.clone(), shifted, torch.arange(32)[None].clone()]
    with accelerate.Accelerator.maybe_context_parallel(Accelerator(), buffers=buffers, buffer_seq_dims=[1, 1, 1],
                                                       no_restore_buffers=set(buffers)):
        assert buffers[0].shape == (1, 16)
        own(input_ids=buffers[0], labels=buffers[1], shift_labels=buffers[1], position_ids=buffers[2],
            num_items_in_batch=torch.tensor(31)).loss.backward()
    for p, other in zip(own.parameters(), right.parameters()):
        dist.all_reduce(p.grad, group=group)
        torch.testing.assert_close(p.grad, other.grad, rtol=1e-4, atol=1e-5)


def models_of_flash_attention_2(group):
    """A Llama of transformers that asks for flash_attention_2: logits and gradients are those of the whole."""
    own, ranks = model(), group.size()
    ids, starts = torch.arange(24)[None] % 32, torch.tensor([0, 7, 24])
    positions = torch.cat([torch.arange(7), torch.arange(17)])[None]
    gradients = []
    for sharded in (False, True):
        own.zero_grad()
        if sharded:
            ring.substitute_hf_flash_attn(group, heads_k_stride=1)
            ring.update_ring_flash_attn_params(starts, group)
            own.config._attn_implementation = "flash_attention_2"  # without the package flash_attn
            logits = own(ids.chunk(ranks, 1)[group.rank()], position_ids=positions.chunk(ranks, 1)[group.rank()]).logits
        else:
            own.set_attn_implementation("eager")
            parts = [own(ids[:, a:b]).logits for a, b in ((0, 7), (7, 24))]
            logits = torch.cat(parts, 1).chunk(ranks, 1)[group.rank()]
        gradients.append([logits.detach()])
        logits.square().sum().backward()
        for p in own.parameters():
            torch.distributed.all_reduce(p.grad, group=group)
            gradients[-1].append(p.grad.clone())
    for one, other in zip(*gradients):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    try:
        own(ids.expand(2, -1))
        raise AssertionError("a batch was taken")
    except longspan.UnsupportedError as error:
        assert "a batch of several" in str(error)
