// Functions of the CUDA driver, without linking its library.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "longspan/error.hpp"
#include "src/base/check.hpp"

namespace longspan {

/// The function `name` of CUDA 12's driver; `Function` is the type of a pointer to it. Throws
/// BackendError if the driver is older.
template <class Function>
Function driver_function(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  LONGSPAN_CUDA(
      cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found));
  if (found != cudaDriverEntryPointSuccess)
    throw BackendError(std::string("CUDA: this driver has no ") + name +
                       ": update it to 525 or newer");
  return reinterpret_cast<Function>(function);
}

}  // namespace longspan
