#include "comm/cuda/stream_flags.hpp"

#include <cuda.h>
#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "src/base/driver_function.hpp"

namespace longspan::comm {
namespace {

/// The value that an operation writes into its half of a flag.
cuuint32_t written_by(const FlagOperation& operation) {
  switch (operation.kind) {
    case FlagOperation::raise:
      return operation.value;
    case FlagOperation::free:
      return 0x7fffffff;
    default:
      return 0;
  }
}

CUdeviceptr address(const std::byte* at) { return reinterpret_cast<CUdeviceptr>(at); }

CUstreamBatchMemOpParams parameters(const FlagOperation& operation) {
  CUstreamBatchMemOpParams p{};
  if (operation.kind == FlagOperation::wait) {
    p.operation = CU_STREAM_MEM_OP_WAIT_VALUE_64;
    p.waitValue.address = address(operation.flag);
    p.waitValue.value64 = 1;
    p.waitValue.flags = CU_STREAM_WAIT_VALUE_GEQ;
    return p;
  }
  const bool frees = operation.kind == FlagOperation::free;
  p.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
  p.writeValue.address = address(operation.flag + (frees ? 4 : 0));
  p.writeValue.value = written_by(operation);
  return p;
}

}  // namespace

void queue_flags(cudaStream_t stream, std::span<const FlagOperation> operations) {
  static const auto queue = driver_function<decltype(&cuStreamBatchMemOp)>("cuStreamBatchMemOp");
  std::vector<CUstreamBatchMemOpParams> batch(operations.size());
  std::transform(operations.begin(), operations.end(), batch.begin(), parameters);
  const CUresult result = queue(stream, static_cast<unsigned>(batch.size()), batch.data(), 0);
  if (result != CUDA_SUCCESS)
    throw BackendError(
        fmt::format("CUDA: cuStreamBatchMemOp returned {}", static_cast<int>(result)));
}

}  // namespace longspan::comm
