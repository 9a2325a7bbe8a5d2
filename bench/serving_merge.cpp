// A plain copy, and the merge of two outputs, which has to keep up with it.
#include "bench/serving.hpp"

#include <cmath>
#include <limits>
#include <vector>

namespace longspan::bench {
void copy(const Settings& s) {
#ifdef LONGSPAN_HAVE_CUDA
  if (s.device != Device::cuda) return;
  const std::size_t bytes = std::size_t{1} << (s.tiny ? 20 : 31);
  const Buffer from(s.device, bytes), to(s.device, bytes);
  launcher::cuda_ok(cudaMemset(from.data(), 0x3c, bytes), "memset");
  const auto work = [&](int, Stream stream) {
    launcher::cuda_ok(cudaMemcpyAsync(to.data(), from.data(), bytes, cudaMemcpyDeviceToDevice,
                                      static_cast<cudaStream_t>(stream.handle)),
                      "copy");
  };
  const Times t = times(s.device, work, effort(s, 1));
  print({{"section", "copy"}, {"bytes", 2 * bytes}, {"tb_s", rate(2.0 * bytes, t)}}, t, nullptr,
        fp32);
#else
  (void)s;
#endif
}

namespace {

constexpr double kInCache = 60e6;  // bytes

struct MergeRow {
  std::int64_t tokens;
  int heads;
};
constexpr MergeRow kMerge[] = {{256, 16}, {1024, 32}, {4096, 32}, {16384, 64}};

/// A prefix and a suffix, and their merge: lse [heads, tokens], a tenth of the prefix empty.
struct MergeSet {
  static constexpr int kDim = 128;

  MergeSet(Device device, DType dtype, MergeRow row, std::uint64_t seed) {
    const auto [tokens, heads] = row;
    const auto lses = [&](std::uint64_t of, bool some_empty) {
      const Values values{of, fp32};
      std::vector<float> drawn(tokens * heads);
      for (std::size_t i = 0; i < drawn.size(); ++i)
        drawn[i] = some_empty && i % 10 == 3
                       ? std::numeric_limits<float>::infinity()
                       : 8.0f + 2.0f * values.exact()(static_cast<std::uint64_t>(i));
      return Numbers<float>(device, std::move(drawn));
    };
    for (int part = 0; part < 2; ++part) {
      in[part] = Array(device, {seed + part, dtype}, {tokens, heads, kDim});
      lse[part] = lses(seed + 2 + part, part == 0);
    }
    out = Array::nan(device, dtype, {tokens, heads, kDim});
    out_lse = Array::nan(device, fp32, {heads, tokens});
  }

  MergeAttnStates args() const {
    const auto lse_view = [&](const float* data) {
      Tensor t = out_lse.view;
      t.data = const_cast<float*>(data);
      return Lse::heads_tokens(t);
    };
    MergeAttnStates a;
    a.out = out.view;
    a.out_lse = Lse::heads_tokens(out_lse.view);
    a.prefix_out = in[0].view;
    a.prefix_lse = lse_view(lse[0].data());
    a.suffix_out = in[1].view;
    a.suffix_lse = lse_view(lse[1].data());
    return a;
  }

  Judge judge() const {
    const std::int64_t tokens = out.view.shape[0], heads = out.view.shape[1];
    const std::vector<std::byte> result = out.download();
    Judge found;
    for (std::int64_t row = 0; row < tokens * heads; row += 1 + tokens * heads / 4099) {
      const std::int64_t at = row % heads * tokens + row / heads;  // in the lse
      const double a = lse[0].host[at], b = lse[1].host[at];
      const double weight = std::isinf(a) ? 0 : 1 / (1 + std::exp(b - a));
      for (std::int64_t i = row * kDim; i < (row + 1) * kDim; ++i)
        found.compare(load_element(result.data(), out.view.dtype, i),
                      weight * in[0].values(i) + (1 - weight) * in[1].values(i));
    }
    return found;
  }

  Array in[2], out, out_lse;
  Numbers<float> lse[2];
};

void merge(const Settings& s, const ServingOps& ops, DType dtype, MergeRow row) {
  const double rows = static_cast<double>(row.tokens) * row.heads;
  const double bytes = 3 * rows * (MergeSet::kDim * size_of(dtype) + sizeof(float));
  // Inputs that fit in the cache are measured there, as in a model's layer.
  const bool in_cache = bytes < kInCache;
  const int count = in_cache || s.tiny ? 1 : static_cast<int>(std::ceil(kBeyondCache / bytes));
  std::vector<MergeSet> sets;
  for (int i = 0; i < count; ++i) sets.emplace_back(s.device, dtype, row, 10 * i + 40);
  const Times t = times(
      s.device,
      [&](int i, Stream stream) {
        ops.merge_attn_states(sets[i % count].args(), LogBase::e, stream);
      },
      effort(s, (20 + count - 1) / count * count));
  const Judge judge = sets.back().judge();
  print({{"section", "merge"},
         {"dtype", name(dtype)},
         {"tokens", row.tokens},
         {"heads", row.heads},
         {"dim", MergeSet::kDim},
         {"in_cache", in_cache},
         {"bytes", bytes},
         {"tb_s", rate(bytes, t)}},
        t, &judge, dtype);
}

}  // namespace

void merge(const Settings& s, const ServingOps& ops) {
  for (DType dtype : {bf16, fp32}) {
    for (std::size_t r = 0; r < std::size(kMerge); ++r) {
      MergeRow row = kMerge[r];
      if (s.tiny) row.tokens /= 64;
      if (s.takes(r))
        attempt({{"section", "merge"}, {"row", r}, {"dtype", name(dtype)}},
                [&] { merge(s, ops, dtype, row); });
    }
  }
}

}  // namespace longspan::bench
