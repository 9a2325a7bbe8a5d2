// The CUDA backend: checks its arguments, and passes them to the kernels.
#include "kernels/backend.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <variant>
#include <vector>

#include "kernels/cuda/cache/digest.hpp"
#include "kernels/cuda/cache/gather.hpp"
#include "kernels/cuda/combine/merge.hpp"
#include "kernels/cuda/dispatch/attend.hpp"
#include "kernels/cuda/dispatch/attend_finished.hpp"
#include "kernels/cuda/dispatch/families.hpp"
#include "kernels/cuda/exchange/exchange.hpp"
#include "kernels/cuda/gradients/gradients.hpp"
#include "kernels/cuda/gradients/sums.hpp"
#include "kernels/features.hpp"
#include "src/base/check.hpp"

namespace longspan::kernels {
namespace {

cudaStream_t stream_of(Stream stream) { return static_cast<cudaStream_t>(stream.handle); }

class CudaTimer final : public Timer {
 public:
  explicit CudaTimer(int marks) : events_(static_cast<std::size_t>(marks)) {
    try {
      for (cudaEvent_t& event : events_) LONGSPAN_CUDA(cudaEventCreate(&event));
    } catch (...) {
      end();
      throw;
    }
  }
  ~CudaTimer() override { end(); }
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
  void end() {
    for (cudaEvent_t event : events_)
      if (event != nullptr) static_cast<void>(LONGSPAN_CUDA_WORKED(cudaEventDestroy(event)));
  }

  std::vector<cudaEvent_t> events_;
};

class CudaBackend final : public Backend {
 public:
  CudaBackend() {
    int device = 0, major = 0;
    LONGSPAN_CUDA(cudaGetDevice(&device));
    LONGSPAN_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    if (major < 8)
      throw Unsupported("GPU of compute capability " + std::to_string(major) +
                        ".x: the CUDA kernels need 8.0 (Ampere) or later");
    gpu_ = cuda::current_gpu();
  }

  Device device() const override { return Device::cuda; }

  void check(const AttendParams& p) const override {
    check_head_dims(p.head_dim, p.value_dim);
    check_features(p, Device::cuda);
    cuda::check(p, gpu_);
    if (p.bias.qq && is_fp8(p.bias.qq.values.dtype))
      throw Unsupported(std::string("qq_bias of ") + name(p.bias.qq.values.dtype) +
                        ": the CUDA kernels take fp32, fp16 and bf16");
    if (p.sees_prefix() && p.invariant)
      throw Unsupported(
          "a prefix with window or chunks and invariant: CUDA kernels take it in two passes, whose "
          "order is not the fixed one; leave invariant off");
    if (p.bias && std::max(p.shard.length, p.max_kv_len) > std::int64_t{1} << 31)
      throw Unsupported(
          "ALiBi or qq_bias with more than 2^31 keys in a sequence: the CUDA kernels " +
          std::string("hold distances in 32 bits"));
  }

  std::size_t attend_scratch(const AttendParams& bounds) const override {
    const auto states = [this](AttendParams p) {
      p.resume = p.resume || p.sees_prefix();
      return cuda::scratch_bound(p, gpu_);
    };
    return bounds.indices ? sparse_scratch(bounds, states) : states(bounds);
  }
  using AttentionKernels::attend;
  bool attend(const AttendParams& params, const Epilogue& given, Stream stream,
              const EpilogueBegins& begins, const BetweenTiles&) const override {
    check(params);
    if (params.indices) {
      attend_by_indices(params, stream);
      queue(given, stream, begins);
      return false;
    }
    AttendParams p = params;
    const auto* const result = std::get_if<MergeParams>(&given);
    const bool comes_or_goes =
        p.arrivals != nullptr || (result != nullptr && result->places != nullptr);
    if (comes_or_goes && (result == nullptr || !takes_arrivals(p, *result)))
      throw InputError(
          "attend was given keys that still come (arrivals), or rows that end at several ranks "
          "(places), for a call whose kernel does not take them; ask takes_arrivals first");
    if (p.new_k.data != nullptr && !cuda::writes_new_keys(p, gpu_)) {
      append(append_of(p), stream);
      p.new_k = p.new_v = {};
    }
    if (p.sees_prefix()) {  // two passes, as kernels take one interval
      cuda::attend(p, gpu_, stream_of(stream));
      p.only_prefix = p.resume = true;
      cuda::attend(p, gpu_, stream_of(stream));
      queue(given, stream, begins);
      return false;
    }
    Epilogue epilogue = given;
    if (auto* exchange = std::get_if<ExchangeParams>(&epilogue))
      exchange->pushed = !exchange->apart && cuda::is_decode(p);
    if (attend_to_the_end(p, epilogue, stream, bool{begins})) return true;
    cuda::attend(p, gpu_, stream_of(stream));
    queue(epilogue, stream, begins);
    return false;
  }
  bool takes_arrivals(const AttendParams& p, const MergeParams& m) const override {
    return cuda::takes_arrivals(p, m, gpu_);
  }
  void merge(const MergeParams& p, Stream stream) const override {
    cuda::merge(p, stream_of(stream));
  }
  void exchange(const ExchangeParams& p, Stream stream) const override {
    cuda::exchange(p, stream_of(stream));
  }
  std::size_t peer_buffer_bytes(std::int64_t rows, int dim, int ranks) const override {
    return cuda::peer_buffer_bytes(rows, dim, ranks);
  }
  void digest(const DigestParams& p, Stream stream) const override {
    cuda::digest(p, stream_of(stream));
  }
  void write_run_digest(const RunDigestParams& p, Stream stream) const override {
    cuda::write_run_digest(p, stream_of(stream));
  }
  std::shared_ptr<std::byte> shared_memory(std::size_t bytes) const override {
    void* memory = nullptr;  // host and device use the same address
    LONGSPAN_CUDA(cudaHostAlloc(&memory, bytes, cudaHostAllocPortable | cudaHostAllocMapped));
    std::memset(memory, 0, bytes);
    return {static_cast<std::byte*>(memory), [](std::byte* data) { cudaFreeHost(data); }};
  }
  void map_rows(const MapParams& p, Stream stream) const override {
    cuda::map_rows(p, stream_of(stream));
  }
  void place_rows(const PlaceParams& p, Stream stream) const override {
    cuda::place_rows(p, stream_of(stream));
  }
  void rotate_rows(const RotateParams& p, Stream stream) const override {
    cuda::rotate_rows(p, stream_of(stream));
  }
  void key_starts(const KeyStartParams& p, Stream stream) const override {
    cuda::key_starts(p, stream_of(stream));
  }
  void row_starts(const RowStartParams& p, Stream stream) const override {
    cuda::row_starts(p, stream_of(stream));
  }
  void copy_keys(const CopyKeysParams& p, Stream stream) const override {
    cuda::copy_keys(p, stream_of(stream));
  }
  void move_keys(const MoveKeysParams& p, Stream stream) const override {
    cuda::move_keys(p, stream_of(stream));
  }
  void merge_outputs(const MergeOutputsParams& p, Stream stream) const override {
    cuda::merge_outputs(p, stream_of(stream));
  }
  void copy_rows(std::span<const StridedCopy> copies, Stream stream) const override {
    cuda::copy_rows(copies, stream_of(stream));
  }
  void put_rows(const RowPuts& puts, Stream stream) const override {
    cuda::put_rows(puts, gpu_.multiprocessors, stream_of(stream));
  }
  void pack_outputs(const PackOutputsParams& p, Stream stream) const override {
    cuda::pack_outputs(p, stream_of(stream));
  }
  void pack_states(const PackStatesParams& p, Stream stream) const override {
    cuda::pack_states(p, stream_of(stream));
  }
  void export_segments(const ExportSegmentsParams& p, Stream stream) const override {
    cuda::export_segments(p, stream_of(stream));
  }
  void reduce_segments(const ReduceSegmentsParams& p, Stream stream) const override {
    cuda::reduce_segments(p, stream_of(stream));
  }
  void append(const AppendParams& p, Stream stream) const override {
    cuda::append(p, stream_of(stream));
  }
  void attend_context(const ContextParams& p, Stream stream) const override {
    if (p.room_bytes > 0) {
      const cuda::GatheredParams gathered{whole(p.cached), p.fresh.k, p.fresh.v,
                                          p.merge,         p.room,    p.room_bytes};
      check(gathered.attend);
      if (cuda::attend_gathered(gathered, gpu_, stream_of(stream))) return;
    }
    attend_context_by_states(*this, p, stream);
  }
  std::size_t context_room(const AttendParams& bounds) const override {
    return cuda::gather_room(whole(bounds), gpu_);
  }
  void cut_context(const ContextCutParams& p, Stream stream) const override {
    cuda::cut_context(p, stream_of(stream));
  }
  void check_arrays(const CheckParams& p, Stream stream) const override {
    cuda::check_arrays(p, stream_of(stream));
  }
  void load_gradients() const override {
    cuda::load_sums();
    cuda::load_row_terms();
    cuda::load_bias_gradients();
  }
  void row_terms(const RowTermParams& p, Stream stream) const override {
    cuda::row_terms(p, stream_of(stream));
  }
  void sink_gradients(const SinkGradientParams& p, Stream stream) const override {
    cuda::sink_gradients(p, stream_of(stream));
  }
  void widen_gradients(const WidenGradientsParams& p, Stream stream) const override {
    cuda::widen_gradients(p, stream_of(stream));
  }
  void clear_sums(float* sums, std::int64_t count, Stream stream) const override {
    cuda::clear_sums(sums, count, stream_of(stream));
  }
  void add_to_first_columns(const AddColumnsParams& p, Stream stream) const override {
    cuda::add_to_first_columns(p, stream_of(stream));
  }
  using GradientKernels::add_sums;  // of fp64, which are refused
  void add_sums(float* to, const float* from, std::int64_t count, Stream stream) const override {
    cuda::add_sums(to, from, count, stream_of(stream));
  }
  void turn_back_sums(const TurnBackParams& p, Stream stream) const override {
    cuda::turn_back_sums(p, stream_of(stream));
  }
  void turn_back_keys(const TurnBackKeysParams& p, Stream stream) const override {
    cuda::turn_back_keys(p, stream_of(stream));
  }
  void store_gradients(const StoreGradientParams& p, Stream stream) const override {
    cuda::store_gradients(p, stream_of(stream));
  }
  std::unique_ptr<Timer> timer(int marks) const override {
    return std::make_unique<CudaTimer>(marks);
  }
  std::size_t gradient_scratch(const GradientParams& bounds) const override {
    return cuda::gradient_scratch(bounds, gpu_);
  }
  bool stores_gradients(const GradientParams& p) const override {
    return cuda::stores_gradients(p, gpu_);
  }
  void attend_gradients(const GradientParams& p, Stream stream,
                        const BetweenTiles&) const override {
    cuda::attend_gradients(p, gpu_, stream_of(stream));
  }

 private:
  void attend_by_indices(const AttendParams& p, Stream stream) const {
    if (p.new_k.data != nullptr) append(append_of(p), stream);
    const SparseAttention steps = sparse_attention(p);
    cuda::check(steps.attend, gpu_);
    cuda::compact_keys(steps.compact, stream_of(stream));
    cuda::attend(steps.attend, gpu_, stream_of(stream));
  }

  /// Queues attention and epilogue in one kernel; returns false if nothing was done. If it is
  /// `timed`, an exchange is a separate kernel.
  bool attend_to_the_end(const AttendParams& p, const Epilogue& epilogue, Stream stream,
                         bool timed) const {
    if (const auto* result = std::get_if<MergeParams>(&epilogue))
      return cuda::attend_finished(p, *result, gpu_, stream_of(stream));
    const auto* exchange = std::get_if<ExchangeParams>(&epilogue);
    return exchange != nullptr && !exchange->apart && !timed &&
           cuda::attend_exchanged(p, *exchange, gpu_, stream_of(stream));
  }

  /// Returns the whole sequences as one rank would hold them: cached and new keys together.
  static AttendParams whole(AttendParams cached) {
    cached.shard = Shard::contiguous(0, 0, 1);
    return cached;
  }

  cuda::Gpu gpu_;
};

}  // namespace

std::unique_ptr<Backend> cuda_backend() { return std::make_unique<CudaBackend>(); }

}  // namespace longspan::kernels
