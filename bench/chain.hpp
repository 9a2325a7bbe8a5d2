// The keys of one sequence in parts, as the steps of a ring bring them: three ways to one result.
//
//     whole    one call over all keys, finished
//     chain    each part begins from the state of those before; the last one is finished
//     merge    each part into a slot of its own, then a merge of the slots
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

#include "bench/data.hpp"
#include "bench/paged.hpp"
#include "kernels/backend.hpp"
#include "longspan/buffer.hpp"

namespace longspan::bench {

enum class Way { whole, chain, merge };

inline const char* name(Way way) {
  return way == Way::whole ? "whole" : way == Way::chain ? "chain" : "merge";
}

struct ChainRow {
  std::int64_t tokens, keys;  // keys: a multiple of parts segments
  int parts;
};

class Chain {
 public:
  static constexpr int kHeads = 32, kKvHeads = 8, kDim = 128;

  Chain(Device device, int threads, ChainRow row)
      : row_(row),
        backend_(device == Device::cuda ? kernels::cuda_backend() : kernels::host_backend(threads)),
        q_(device, {20, bf16}, {row.tokens, kHeads, kDim}),
        k_(device, {21, bf16}, {row.keys, kKvHeads, kDim}),
        v_(device, {22, bf16}, {row.keys, kKvHeads, kDim}),
        out_(Array::nan(device, bf16, {row.tokens, kHeads, kDim})),
        states_{nullptr, row.tokens * kHeads, kDim, row.parts} {
    memory_ = Buffer(device, static_cast<std::size_t>(states_.slot_bytes()) * states_.slots);
    states_.data = static_cast<std::byte*>(memory_.data());
    kernels::AttendParams bounds = part(0, row.parts);
    bounds.resume = true;
    scratch_ = Buffer(device, backend_->attend_scratch(bounds));
  }

  void operator()(Way way, Stream stream) const {
    if (way == Way::whole) return finish(part(0, 1), stream);
    for (int i = 0; i < row_.parts; ++i) {
      kernels::AttendParams p = part(i, row_.parts);
      if (way == Way::merge) {
        p.slot = i;
        backend_->attend(p, stream);
        continue;
      }
      p.resume = i > 0;
      if (i + 1 == row_.parts) return finish(p, stream);
      backend_->attend(p, stream);
    }
    backend_->merge(result_of(row_.parts), stream);
  }

  double operations() const {
    return 4.0 * kHeads * kDim * static_cast<double>(row_.tokens) * static_cast<double>(row_.keys);
  }

  /// A few rows of what the last call gave.
  Judge judge() const {
    const std::vector<std::byte> result = out_.download();
    Judge found;
    for (const std::int64_t token : {std::int64_t{0}, row_.tokens / 2, row_.tokens - 1})
      for (const int head : {0, kHeads / 2 + 1, kHeads - 1}) {
        const std::int64_t row = (token * kHeads + head) * kDim;
        const auto at = [&](std::int64_t j) {
          return (j * kKvHeads + head / (kHeads / kKvHeads)) * kDim;
        };
        const std::vector<double> exact = attend_exactly(
            0, row_.keys, kDim,
            [&](std::int64_t j) {
              double product = 0;
              for (int d = 0; d < kDim; ++d) product += q_.values(row + d) * k_.values(at(j) + d);
              return product / std::sqrt(static_cast<double>(kDim));
            },
            [&](std::int64_t j, int d) { return v_.values(at(j) + d); });
        for (int d = 0; d < kDim; ++d)
          found.compare(load_element(result.data(), bf16, row + d), exact[d]);
      }
    return found;
  }

 private:
  /// The i-th of `parts` parts of the keys, which lie where the whole ones do.
  kernels::AttendParams part(int i, int parts) const {
    const Shard shard = Shard::contiguous(row_.keys, i, parts);
    const std::int64_t step = std::int64_t{kKvHeads} * kDim,
                       first = shard.position(0, row_.keys) * step;
    kernels::AttendParams p;
    p.dtype = p.q_dtype = p.kv_dtype = bf16;
    p.tokens = row_.tokens;
    p.heads = kHeads;
    p.kv_heads = kKvHeads;
    p.dim = kDim;
    p.q = {q_.view.data, std::int64_t{kHeads} * kDim, kDim};
    p.k = {static_cast<std::uint16_t*>(k_.view.data) + first, step, kDim};
    p.v = {static_cast<std::uint16_t*>(v_.view.data) + first, step, kDim};
    p.shard = shard;
    p.score = {1.0f / std::sqrt(static_cast<float>(kDim)), 0.0f};
    p.max_kv_len = row_.keys;
    p.state = states_;
    p.scratch = static_cast<std::byte*>(scratch_.data());
    p.scratch_bytes = scratch_.bytes();
    return p;
  }

  /// Of the first `slots` slots.
  kernels::MergeParams result_of(int slots) const {
    kernels::MergeParams m;
    m.states = states_;
    m.states.slots = slots;
    m.heads = kHeads;
    m.tokens = row_.tokens;
    m.dtype = bf16;
    m.out = {out_.view.data, std::int64_t{kHeads} * kDim, kDim};
    return m;
  }

  void finish(const kernels::AttendParams& p, Stream stream) const {
    const kernels::MergeParams m = result_of(1);
    if (backend_->attend_finished(p, m, stream)) return;
    backend_->attend(p, stream);
    backend_->merge(m, stream);
  }

  ChainRow row_;
  std::unique_ptr<kernels::Backend> backend_;
  Array q_, k_, v_, out_;
  kernels::StateSlots states_;
  Buffer memory_, scratch_;
};

}  // namespace longspan::bench
