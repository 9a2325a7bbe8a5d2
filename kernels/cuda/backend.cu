// The CUDA backend: checks what it is given, and hands it to the kernels.
#include "kernels/backend.hpp"

#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "kernels/cuda/attend.hpp"
#include "kernels/cuda/merge.hpp"
#include "src/check.hpp"

namespace longspan::kernels {
namespace {

cudaStream_t stream_of(Stream stream) { return static_cast<cudaStream_t>(stream.handle); }

class CudaTimer final : public Timer {
 public:
  explicit CudaTimer(int marks) : events_(static_cast<std::size_t>(marks)) {
    for (cudaEvent_t& event : events_) LONGSPAN_CUDA(cudaEventCreate(&event));
  }
  ~CudaTimer() override {
    for (cudaEvent_t event : events_) cudaEventDestroy(event);
  }
  void mark(int index, Stream stream) override {
    LONGSPAN_CUDA(cudaEventRecord(events_.at(static_cast<std::size_t>(index)), stream_of(stream)));
  }
  double milliseconds(int from, int to) const override {
    float elapsed = 0;
    LONGSPAN_CUDA(cudaEventElapsedTime(&elapsed, events_.at(static_cast<std::size_t>(from)),
                                       events_.at(static_cast<std::size_t>(to))));
    return elapsed;
  }

 private:
  std::vector<cudaEvent_t> events_;
};

/// The kernels read 16 bytes at a time.
void check_alignment(const char* name, const Rows& rows, DType dtype) {
  const std::int64_t bytes = static_cast<std::int64_t>(size_of(dtype));
  if (reinterpret_cast<std::uintptr_t>(rows.data) % 16 == 0 && rows.row_stride * bytes % 16 == 0 &&
      rows.head_stride * bytes % 16 == 0)
    return;
  throw Unsupported(std::string(name) +
                    " has its data or rows at addresses that are not multiples " +
                    "of 16 bytes, which the CUDA kernels need: copy it into a dense tensor");
}

class CudaBackend final : public Backend {
 public:
  CudaBackend() {
    int device = 0, major = 0;
    LONGSPAN_CUDA(cudaGetDevice(&device));
    LONGSPAN_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    if (major < 8)
      throw Unsupported("GPU of compute capability " + std::to_string(major) +
                        ".x: the CUDA kernels need 8.0 (Ampere) or later");
    LONGSPAN_CUDA(
        cudaDeviceGetAttribute(&gpu_.multiprocessors, cudaDevAttrMultiProcessorCount, device));
  }

  Device device() const override { return Device::cuda; }

  void check(const AttendParams& p) const override {
    if (p.dim < 16 || p.dim > 256 || p.dim % 8 != 0)
      throw Unsupported("head dim " + std::to_string(p.dim) +
                        ": the CUDA kernels take 16 to 256 in steps of 8");
    check_alignment("q", p.q, p.dtype);
    check_alignment("k", p.k, p.dtype);
    check_alignment("v", p.v, p.dtype);
  }

  std::size_t attend_scratch(const AttendParams& bounds) const override {
    return cuda::scratch_bound(bounds, gpu_);
  }
  void attend(const AttendParams& p, Stream stream) const override {
    check(p);
    cuda::attend(p, gpu_, stream_of(stream));
  }
  void merge(const MergeParams& p, Stream stream) const override {
    cuda::merge(p, stream_of(stream));
  }
  void map_rows(const MapParams& p, Stream stream) const override {
    cuda::map_rows(p, stream_of(stream));
  }
  void place_rows(const PlaceParams& p, Stream stream) const override {
    cuda::place_rows(p, stream_of(stream));
  }
  void key_starts(const KeyStartParams& p, Stream stream) const override {
    cuda::key_starts(p, stream_of(stream));
  }
  std::unique_ptr<Timer> timer(int marks) const override {
    return std::make_unique<CudaTimer>(marks);
  }

 private:
  cuda::Gpu gpu_;
};

}  // namespace

std::unique_ptr<Backend> cuda_backend() { return std::make_unique<CudaBackend>(); }

}  // namespace longspan::kernels
