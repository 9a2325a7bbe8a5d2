// Throws what a check of arrays found as a typed error. The check itself is a kernel
// (ServingKernels::check_arrays), because the arrays lie where the kernels run.
#pragma once

#include "kernels/params.hpp"
#include "longspan/buffer.hpp"

namespace longspan {

/// Throws InputError, which names the sequence, the column and the value; does nothing when there
/// is no fault.
void throw_fault(const kernels::FaultReport& report);

/// A report in the memory of a device, which outlives the calls that write to it.
class FaultBox {
 public:
  FaultBox() = default;
  explicit FaultBox(Device device);

  explicit operator bool() const { return memory_.data() != nullptr; }
  kernels::FaultReport* report() const {
    return static_cast<kernels::FaultReport*>(memory_.data());
  }
  /// Throws what was reported, once. It is to be called when the stream has passed the check.
  void read();

 private:
  Buffer memory_;
};

}  // namespace longspan
