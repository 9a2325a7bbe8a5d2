// The output memory of every strategy's attention: slots of states, of one rank or of several, and
// the scratch of its kernels.
#pragma once

#include <cstddef>
#include <cstdint>

#include "src/strategy/strategy.hpp"

namespace longspan {

class StateMemory {
 public:
  /// For attentions up to `largest`, with `slots` slots for its states.
  StateMemory(const kernels::AttentionKernels& kernels, const kernels::AttendParams& largest,
              int slots = 1)
      : heads_(largest.heads),
        value_dim_(largest.value_dim),
        slots_(slots),
        slot_bytes_(static_cast<std::size_t>(
            kernels::StateSlots::bytes(largest.tokens * largest.heads, largest.value_dim))),
        scratch_bytes_(kernels.attend_scratch(largest)) {}

  void lay_out(Parts& memory) {
    lay_out_slots(memory);
    lay_out_scratch(memory);
  }
  /// The parts of lay_out: attentions that do not end in a result write slots, and every attention
  /// uses the scratch.
  void lay_out_slots(Parts& memory) {
    states_ = memory.take(static_cast<std::size_t>(slots_) * slot_bytes_);
  }
  void lay_out_scratch(Parts& memory) { scratch_ = memory.take(scratch_bytes_); }

  /// Points the attention of a pass at slot `slot`, of `rows` rows, and the merge at all slots.
  void give(Pass& pass, int slot, std::int64_t rows) const {
    pass.attend.scratch = scratch_;
    pass.attend.scratch_bytes = scratch_bytes_;
    pass.attend.state = {states_, rows * heads_, value_dim_, slots_};
    pass.attend.slot = slot;
    pass.merge.states = pass.attend.state;
  }
  void give(Pass& pass, int slot = 0) const { give(pass, slot, pass.attend.tokens); }

 private:
  int heads_, value_dim_, slots_;
  std::size_t slot_bytes_, scratch_bytes_;
  std::byte* states_ = nullptr;   // [slots] of the most rows
  std::byte* scratch_ = nullptr;  // AttentionKernels::attend_scratch
};

}  // namespace longspan
