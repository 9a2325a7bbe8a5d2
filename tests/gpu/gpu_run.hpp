// One call of the CUDA kernels in a test: the sequences of a case, dealt out to simulated ranks on
// one GPU, attended rank by rank into the slots of the gathered states, and merged. Outputs are
// poisoned with NaN first, so an unwritten row shows.
#pragma once

#include <memory>

#include "tests/gpu/gpu_case.hpp"

namespace longspan::test {

struct Result {
  std::vector<std::byte> out;  // [tokens, heads, value_dim] of the case's dtype
  std::vector<float> lse;      // [tokens, heads]
};

/// Rows of `row` bytes, `gap` bytes of NaN behind each.
inline std::vector<std::byte> spread(const std::vector<std::byte>& rows, std::size_t row,
                                     std::size_t gap) {
  if (gap == 0) return rows;
  std::vector<std::byte> wide(rows.size() / row * (row + gap), std::byte{0xff});
  for (std::size_t i = 0; i < rows.size() / row; ++i)
    std::copy_n(rows.data() + i * row, row, wide.data() + i * (row + gap));
  return wide;
}

/// Everything on the GPU, ready to run again and again.
class GpuRun {
 public:
  GpuRun(const Case& c, const Data& data) : c_(c), backend_(kernels::cuda_backend()) {
    const std::size_t size = size_of(c.dtype),
                      q_row = static_cast<std::size_t>(std::int64_t{c.heads} * c.dim) * size,
                      k_row = static_cast<std::size_t>(std::int64_t{c.kv_heads} * c.dim) * size,
                      v_row =
                          static_cast<std::size_t>(std::int64_t{c.kv_heads} * c.of_value()) * size;
    q_ = OnGpu<std::byte>(spread(data.q, q_row, static_cast<std::size_t>(c.q_gap) * size));
    sinks_ = OnGpu<float>(data.sinks);
    slopes_ = OnGpu<float>(data.slopes);
    causal_ = OnGpu<std::uint8_t>(c.causal);
    dropout_seed_ = OnGpu<std::int64_t>(
        std::vector<std::int64_t>(std::begin(Case::kDropoutSeed), std::end(Case::kDropoutSeed)));
    std::vector<std::int32_t> starts{0};
    for (int n : c.q_lens) starts.push_back(starts.back() + n);
    query_start_ = OnGpu<std::int32_t>(starts);
    kv_len_ = OnGpu<std::int32_t>(std::vector<std::int32_t>(c.kv_lens.begin(), c.kv_lens.end()));
    for (int rank = 0; rank < c.ranks; ++rank) {
      // The rank's own keys, sequence after sequence.
      std::vector<std::byte> k, v;
      std::vector<std::int64_t> table;
      Rank on;
      on.shard = {c.layout, rank, c.ranks, c.batch() == 1 ? c.kv_lens[0] : 0, c.block};
      if (c.layout == Layout::ranges)
        for (std::int64_t len : c.kv_lens)
          for (int r = 0; r <= c.ranks; ++r)  // uneven on purpose
            table.push_back(len * r * r / (c.ranks * c.ranks));
      for (int b = 0; b < c.batch(); ++b) {
        Shard host = on.shard;
        host.table = table.data();
        host = host.for_sequence(b);
        const std::int64_t len = c.kv_lens[static_cast<std::size_t>(b)];
        std::vector<std::int64_t> positions;
        if (c.layout == Layout::listed) {
          const auto& all = data.permuted[static_cast<std::size_t>(b)];
          positions.assign(all.begin() + len * rank / c.ranks,
                           all.begin() + len * (rank + 1) / c.ranks);
          table = positions;
          host.table = table.data();
          host.listed = on.shard.listed = static_cast<std::int64_t>(table.size());
        } else {
          for (std::int64_t i = 0; i < host.local_len(len); ++i)
            positions.push_back(host.position(i, len));
        }
        const auto append = [&](std::vector<std::byte>& to, const std::vector<std::byte>& from,
                                std::size_t bytes) {
          for (std::int64_t position : positions) {
            const auto first = from.begin() + position * static_cast<std::int64_t>(bytes);
            to.insert(to.end(), first, first + static_cast<std::int64_t>(bytes));
          }
        };
        append(k, data.k[static_cast<std::size_t>(b)], k_row);
        append(v, data.v[static_cast<std::size_t>(b)], v_row);
      }
      const std::size_t gap = static_cast<std::size_t>(c.kv_gap) * size;
      on.k = OnGpu<std::byte>(spread(k, k_row, gap));
      on.v = OnGpu<std::byte>(spread(v, v_row, gap));
      on.table = OnGpu<std::int64_t>(table);
      on.key_start = OnGpu<std::int64_t>(static_cast<std::size_t>(c.batch()));
      if (!table.empty() || c.layout == Layout::listed) on.shard.table = on.table.data();
      ranks_.push_back(std::move(on));
    }
    out_ = OnGpu<std::byte>(static_cast<std::size_t>(c.tokens() * out_row()) * size);
    lse_ = OnGpu<float>(static_cast<std::size_t>(c.tokens() * c.heads));
    states_.rows = c.tokens() * c.heads;
    states_.dim = c.of_value();
    states_.slots = c.ranks;
    state_memory_ = OnGpu<std::byte>(static_cast<std::size_t>(states_.slot_bytes() * c.ranks));
    states_.data = state_memory_.data();
    scratch_ = OnGpu<std::byte>(backend_->attend_scratch(bounds()));
  }

  /// Queues the starts of each sequence's keys on a rank, which attention reads.
  void find_key_starts(int rank, cudaStream_t stream = nullptr) {
    const Rank& on = ranks_[static_cast<std::size_t>(rank)];
    if (lengths_on_device())
      backend_->key_starts({.shard = on.shard,
                            .kv_len = kv_len_.data(),
                            .batch = c_.batch(),
                            .key_start = on.key_start.data()},
                           {stream});
  }

  /// Queues key starts, attention of every rank, and the merge.
  void queue(cudaStream_t stream = nullptr) {
    for (int rank = 0; rank < c_.ranks; ++rank) {
      find_key_starts(rank, stream);
      backend_->attend(params(rank), {stream});
    }
    queue_merge(stream);
  }
  void queue_merge(cudaStream_t stream = nullptr) { backend_->merge(merge_params(), {stream}); }

  /// Attend and merge in one call. True: one kernel did both.
  bool queue_finished(cudaStream_t stream = nullptr) {
    find_key_starts(0, stream);
    return backend_->attend(params(0), merge_params(), {stream});
  }

  void poison() {
    out_.poison();
    lse_.poison();
    state_memory_.poison();
    scratch_.poison();
  }

  Result result() {
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    Result found{out_.values(out_.buffer.bytes()),
                 lse_.values(static_cast<std::size_t>(c_.tokens() * c_.heads))};
    if (c_.out_gap == 0) return found;
    const std::size_t wide = static_cast<std::size_t>(out_row()) * size_of(c_.dtype),
                      row = wide - static_cast<std::size_t>(c_.out_gap) * size_of(c_.dtype);
    std::vector<std::byte> rows;
    for (std::size_t at = 0; at + wide <= found.out.size(); at += wide) {
      const std::byte* first = found.out.data() + at;
      rows.insert(rows.end(), first, first + row);
      EXPECT_TRUE(
          std::all_of(first + row, first + wide, [](std::byte b) { return b == std::byte{0xff}; }))
          << "written between rows of the output: " << c_;
    }
    found.out = std::move(rows);
    return found;
  }

  Result run() {
    poison();
    queue();
    return result();
  }

  OnGpu<std::int32_t>& kv_len() { return kv_len_; }
  OnGpu<std::int32_t>& query_start() { return query_start_; }

  kernels::AttendParams params(int rank) const {
    const Rank& on = ranks_[static_cast<std::size_t>(rank)];
    const auto rows = [&](const OnGpu<std::byte>& memory, int dim) {
      return kernels::KvRows(memory.data(), std::int64_t{c_.kv_heads} * dim + c_.kv_gap, dim);
    };
    kernels::AttendParams p = bounds();
    p.q = {q_.data(), std::int64_t{c_.heads} * c_.dim + c_.q_gap, c_.dim};
    p.k = rows(on.k, c_.dim);
    p.v = rows(on.v, c_.of_value());
    if (lengths_on_device())
      p.batch = {c_.batch(), query_start_.data(), kv_len_.data(), on.key_start.data()};
    if (!c_.causal.empty()) p.batch.causal = causal_.data();
    p.shard = on.shard;
    p.state = states_;
    p.slot = rank;
    p.scratch = scratch_.data();
    p.scratch_bytes = scratch_.buffer.bytes();
    return p;
  }

 private:
  struct Rank {
    Shard shard;
    OnGpu<std::byte> k, v;
    OnGpu<std::int64_t> table, key_start;
  };

  bool lengths_on_device() const { return c_.batch() > 1 || c_.device_lengths; }

  /// As in the layer's plan: no arrays and no length.
  kernels::AttendParams bounds() const {
    kernels::AttendParams p = c_.params();
    if (c_.alibi) p.bias = {Floats(slopes_.data()), *c_.alibi};
    p.dropout.seed = dropout_seed_.data();
    p.dropout.seeds = 2;
    return p;
  }

  kernels::MergeParams merge_params() const {
    kernels::MergeParams m;
    m.states = states_;
    m.interleaved = c_.layout == Layout::interleaved;
    m.heads = c_.heads;
    m.sinks = c_.sinks ? sinks_.data() : nullptr;
    m.tokens = c_.tokens();
    m.dtype = c_.dtype;
    m.out = {out_.data(), out_row(), c_.of_value()};
    m.lse = {lse_.data(), c_.heads, 1};
    m.batch = params(0).batch;
    return m;
  }

  std::int64_t out_row() const { return std::int64_t{c_.heads} * c_.of_value() + c_.out_gap; }

  Case c_;
  std::unique_ptr<kernels::Backend> backend_;
  OnGpu<std::byte> q_, out_, state_memory_, scratch_;
  OnGpu<float> sinks_, slopes_, lse_;
  OnGpu<std::uint8_t> causal_;
  OnGpu<std::int64_t> dropout_seed_;
  OnGpu<std::int32_t> query_start_, kv_len_;
  std::vector<Rank> ranks_;
  kernels::StateSlots states_;
};

}  // namespace longspan::test
