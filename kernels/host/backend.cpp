// The host as a device: it runs Highway tiles on its share of the process's threads.
#include "kernels/backend.hpp"

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "kernels/features.hpp"
#include "kernels/host/bf16_tile.hpp"
#include "kernels/host/gradient_tile.hpp"
#include "kernels/host/host.hpp"
#include "longspan/error.hpp"
#include "src/base/cores.hpp"
#include "src/base/env.hpp"

namespace longspan::kernels {
namespace {

class HostTimer final : public Timer {
 public:
  explicit HostTimer(int marks) : marks_(marks) {}
  void mark(int index, Stream) override { marks_.at(index) = std::chrono::steady_clock::now(); }
  double milliseconds(int from, int to) const override {
    return std::chrono::duration<double, std::milli>(marks_.at(to) - marks_.at(from)).count();
  }

 private:
  std::vector<std::chrono::steady_clock::time_point> marks_;
};

class HostBackend final : public Backend {
 public:
  explicit HostBackend(int threads) : pool_(threads) {}

  Device device() const override { return Device::host; }

  void check(const AttendParams& p) const override {
    check_head_dims(p.head_dim, p.value_dim);
    check_features(p, Device::host);
    if (p.heads < 1 || p.kv_heads < 1 || p.heads % p.kv_heads != 0)
      throw InputError("heads " + std::to_string(p.heads) + " is not a multiple of kv_heads " +
                       std::to_string(p.kv_heads) +
                       ": query head h reads kv head h / (heads / kv_heads)");
  }

  std::size_t attend_scratch(const AttendParams& bounds) const override {
    const auto states = [this](const AttendParams& p) {
      return host::attend_scratch(p, pool_.size());
    };
    return bounds.dtype == DType::fp64 ? host::fp64_scratch(bounds, pool_.size())
           : bounds.indices            ? sparse_scratch(bounds, states)
                                       : states(bounds);
  }
  using AttentionKernels::attend;
  bool attend(const AttendParams& p, const Epilogue& epilogue, Stream stream,
              const EpilogueBegins& begins, const BetweenTiles& between) const override {
    if (p.new_k.data != nullptr) append(append_of(p), stream);
    if (p.dtype == DType::fp64) {
      const auto* const result = std::get_if<MergeParams>(&epilogue);
      if (result == nullptr) throw Error(ErrorKind::internal, "a state of fp64 does not exist");
      host::attend_fp64(p, *result, pool_, between);
      return true;
    }
    if (p.indices)
      attend_by_indices(p, between);
    else
      host::attend(p, pool_, between);
    queue(epilogue, stream, begins);
    return false;
  }
  void merge(const MergeParams& p, Stream) const override { host::merge(p, pool_); }
  std::size_t gradient_scratch(const GradientParams& bounds) const override {
    return bounds.dtype == DType::fp64 ? host::gradient_scratch_fp64(bounds, pool_.size())
                                       : host::gradient_scratch(bounds, pool_.size());
  }
  void row_terms(const RowTermParams& p, Stream) const override {
    p.out_dtype == DType::fp64 ? host::row_terms_fp64(p, pool_) : host::row_terms(p, pool_);
  }
  void sink_gradients(const SinkGradientParams& p, Stream) const override {
    host::sink_gradients(p, pool_);
  }
  void attend_gradients(const GradientParams& p, Stream,
                        const BetweenTiles& between) const override {
    p.dtype == DType::fp64 ? host::attend_gradients_fp64(p, pool_, between)
                           : host::attend_gradients(p, pool_, between);
  }
  void widen_gradients(const WidenGradientsParams& p, Stream) const override {
    host::widen_gradients(p, pool_);
  }
  void clear_sums(float* sums, std::int64_t count, Stream) const override {
    std::fill_n(sums, count, 0.0f);
  }
  void add_sums(float* to, const float* from, std::int64_t count, Stream) const override {
    host::add_sums(to, from, count, pool_);
  }
  void add_sums(double* to, const double* from, std::int64_t count, Stream) const override {
    host::add_sums(to, from, count, pool_);
  }
  void add_to_first_columns(const AddColumnsParams& p, Stream) const override {
    host::add_to_first_columns(p, pool_);
  }
  void store_gradients(const StoreGradientParams& p, Stream) const override {
    p.dtype == DType::fp64 ? host::store_gradients_fp64(p, pool_) : host::store_gradients(p, pool_);
  }
  void turn_back_sums(const TurnBackParams& p, Stream) const override {
    host::turn_back_sums(p, pool_);
  }
  void turn_back_keys(const TurnBackKeysParams& p, Stream) const override {
    host::turn_back_keys(p, pool_);
  }
  void digest(const DigestParams& p, Stream) const override { host::digest(p); }
  void write_run_digest(const RunDigestParams& p, Stream) const override {
    *p.to = run_digest(p.hash, p.contents);
  }
  std::shared_ptr<std::byte> shared_memory(std::size_t bytes) const override {
    return std::shared_ptr<std::byte>(new std::byte[bytes](), std::default_delete<std::byte[]>());
  }
  void map_rows(const MapParams& p, Stream) const override { host::map_rows(p); }
  void place_rows(const PlaceParams& p, Stream) const override { host::place_rows(p, pool_); }
  void rotate_rows(const RotateParams& p, Stream) const override { host::rotate_rows(p, pool_); }
  void key_starts(const KeyStartParams& p, Stream) const override { host::key_starts(p); }
  void row_starts(const RowStartParams& p, Stream) const override { host::row_starts(p); }
  void copy_keys(const CopyKeysParams& p, Stream) const override { host::copy_keys(p, pool_); }
  void move_keys(const MoveKeysParams& p, Stream) const override { host::move_keys(p, pool_); }
  void merge_outputs(const MergeOutputsParams& p, Stream) const override {
    host::merge_outputs(p, pool_);
  }
  void pack_outputs(const PackOutputsParams& p, Stream) const override {
    host::pack_outputs(p, pool_);
  }
  void copy_rows(std::span<const StridedCopy> copies, Stream) const override {
    host::copy_rows(copies, pool_);
  }
  void pack_states(const PackStatesParams& p, Stream) const override {
    host::pack_states(p, pool_);
  }
  void export_segments(const ExportSegmentsParams& p, Stream) const override {
    host::export_segments(p, pool_);
  }
  void reduce_segments(const ReduceSegmentsParams& p, Stream) const override {
    host::reduce_segments(p, pool_);
  }
  void append(const AppendParams& p, Stream) const override { host::append(p, pool_); }
  void attend_context(const ContextParams& p, Stream stream) const override {
    attend_context_by_states(*this, p, stream);
  }
  void cut_context(const ContextCutParams& p, Stream) const override { host::cut_context(p); }
  void check_arrays(const CheckParams& p, Stream) const override { host::check_arrays(p); }

  std::unique_ptr<Timer> timer(int marks) const override {
    return std::make_unique<HostTimer>(marks);
  }

 private:
  void attend_by_indices(const AttendParams& p, const BetweenTiles& between) const {
    const SparseAttention steps = sparse_attention(p);
    host::compact_keys(steps.compact, pool_);
    host::attend(steps.attend, pool_, between);
  }

  mutable host::ThreadPool pool_;
};

}  // namespace

std::string host_bf16_products(bool with_gradients) {
  std::string how = host::has_bf16_products() ? "by AMX" : "in fp32";
  if (with_gradients)
    how += host::has_bf16_gradients() ? ", of gradients by AVX-512 BF16" : ", of gradients in fp32";
  return how;
}

std::unique_ptr<Backend> host_backend(int threads) {
  if (threads <= 0) threads = Env::read().threads;
  return std::make_unique<HostBackend>(threads > 0 ? threads : usable_cores());
}

}  // namespace longspan::kernels
