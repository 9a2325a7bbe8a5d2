// Throws the findings of a check of arrays as a typed error. The check itself is a kernel
// (ServingKernels::check_arrays), because the arrays lie on the device.
#pragma once

#include "kernels/params.hpp"
#include "longspan/buffer.hpp"

namespace longspan {

/// Throws InputError, which names the sequence, the column and the value; does nothing without a
/// fault.
void throw_fault(const kernels::FaultReport& report);

/// A report in device memory, which outlives the calls that write to it.
class FaultBox {
 public:
  FaultBox() = default;
  explicit FaultBox(Device device);

  explicit operator bool() const { return memory_.data() != nullptr; }
  kernels::FaultReport* report() const {
    return static_cast<kernels::FaultReport*>(memory_.data());
  }
  /// Throws the reported fault, once. Call it after the stream has passed the check.
  void read();

 private:
  Buffer memory_;
};

}  // namespace longspan
