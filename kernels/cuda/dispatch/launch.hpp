// How a call of the kernels that share a plan (decode, portable, tf32, fp32) is divided into
// launches, and the scratch of each. All of it is arithmetic: nothing here needs a GPU.
#pragma once

#include <array>
#include <cstddef>

#include "kernels/cuda/dispatch/gpu.hpp"
#include "kernels/params.hpp"

namespace longspan::kernels::cuda {

/// The sequences of one kind of a call, on a GPU. A sequence's query length determines its kind.
/// `loader` is the call's, or any that a call within the limits may have.
struct Kind {
  Lengths lengths;
  Loader loader;
  const Gpu& gpu;
};

Loader loader_of(const AttendParams& p);
Kind kind_of(const AttendParams& p, Lengths lengths, const Gpu& gpu);

/// The kinds that one call serves, with a launch each.
std::array<Lengths, 2> kinds(const Geometry& p);

/// Whether the batch can hold sequences of this kind. Maybe only the device knows the lengths.
bool may_hold(const Geometry& p, Lengths lengths);

/// Returns the instance of the family for sequences of this kind, or null if none fits the GPU.
const Instance* instance_for(Family family, const AttendParams& p, const Kind& kind);

struct KernelLaunch {
  KernelShape shape;
  WorkPlan plan;
  int blocks = 0;
  int shared_bytes = 0;   // of a block
  std::size_t bytes = 0;  // of scratch: ticket, stack, parts
};

/// Plans the launch of a family, which has an instance for the kind.
KernelLaunch make_launch(Family family, const AttendParams& p, const Kind& kind);

/// The slots set aside for the states of a kind of sequences in a call that resumes, one for each
/// slot that it writes, in the memory at `data`. They have all rows of the call, since sequences
/// may be anywhere; but a single sequence begins at the first row, and a short one ends soon.
StateSlots states_aside(const AttendParams& p, Lengths lengths, std::byte* data);

/// The bytes of the states set aside, before this launch's scratch. They are needed if the rows
/// start from a state and the kernel cannot: in decode kernels, and with splits, which another
/// kernel folds.
std::size_t bytes_aside(const AttendParams& p, const KernelLaunch& launch);

/// The most scratch of a kernel, in any call within limits: the bytes of a launch, and the tokens
/// of split rows, whose states may be set aside.
struct Room {
  std::size_t bytes = 0;
  std::int64_t split_tokens = 0;
};
Room room_of(Family family, const AttendParams& limits, const Kind& kind);

/// The most keys of a sequence within these limits.
std::int64_t most_keys_within(const AttendParams& limits);

/// The bytes of `tokens` tokens' states that are set aside.
std::size_t room_aside(const AttendParams& limits, std::int64_t tokens);

}  // namespace longspan::kernels::cuda
