// Decode of the layer over contiguous keys, in the cases of its peers.
#include <cmath>
#include <optional>
#include <vector>
#include "bench/serving.hpp"

namespace longspan::bench {
namespace {

/// kv_len 0: lengths spread evenly over 1 ... kMostRagged, in a random order.
constexpr DecodeRow kLayer[] = {{32, 8, 1, 131072}, {64, 8, 1, 131072}, {32, 8, 8, 32768},
                                {32, 8, 32, 4096},  {8, 1, 16, 65536},  {64, 8, 1, 524288},
                                {32, 8, 1, 1024},   {32, 8, 1, 8192},   {32, 8, 64, 0}};
constexpr std::int64_t kMostRagged = 32768;

/// One rank's layer over contiguous keys [batch, capacity]. Inputs that fit in the cache are
/// several copies, used in turn, so that every call reads from memory.
class LayerDecode {
 public:
  LayerDecode(const Settings& s, const DecodeRow& row)
      : heads_(row.heads), kv_heads_(row.kv_heads), batch_(row.batch), tokens_(s.tokens) {
    const std::int64_t most = s.tiny ? 700 : kMostRagged;
    for (int b = 0; b < batch_; ++b) {
      const std::int64_t place = (b * 37 + 11) % batch_;
      lens_.push_back(static_cast<std::int32_t>(
          row.kv_len > 0 ? (s.tiny ? row.kv_len / 512 + 3 : row.kv_len)
                         : std::max<std::int64_t>(1, most * (place + 1) / batch_)));
      keys_ += lens_.back();
    }
    capacity_ = *std::max_element(lens_.begin(), lens_.end());
    layer_.emplace(self(s.device), Options{.heads = heads_,
                                           .kv_heads = kv_heads_,
                                           .head_dim = kDim,
                                           .dtypes = {.compute = bf16},
                                           .mask = {.causal = true},
                                           .limits = {.max_tokens = std::int64_t{batch_} * tokens_,
                                                      .max_batch = batch_,
                                                      .max_kv_len = capacity_,
                                                      .max_query_len = tokens_},
                                           .threads = s.threads});
    const std::int64_t rows = std::int64_t{batch_} * tokens_;
    q_ = Array(s.device, {20, bf16}, {rows, heads_, kDim});
    out_ = Array::nan(s.device, bf16, {rows, heads_, kDim});
    const int copies =
        s.tiny || bytes() > kBeyondCache ? 1 : static_cast<int>(std::ceil(kBeyondCache / bytes()));
    for (int i = 0; i < copies; ++i) {
      k_.emplace_back(s.device, Values{seed(i), bf16},
                      std::initializer_list<std::int64_t>{batch_, capacity_, kv_heads_, kDim});
      v_.emplace_back(s.device, Values{seed(i) + 1, bf16},
                      std::initializer_list<std::int64_t>{batch_, capacity_, kv_heads_, kDim});
    }
    std::vector<std::int32_t> starts;
    for (int b = 0; b <= batch_; ++b) starts.push_back(b * tokens_);
    starts_on_ = Numbers<std::int32_t>(s.device, std::move(starts));
    lens_on_ = Numbers<std::int32_t>(s.device, std::vector<std::int32_t>(lens_));
  }

  int copies() const { return static_cast<int>(k_.size()); }
  double bytes() const {
    return 2.0 * static_cast<double>(keys_) * kv_heads_ *
           static_cast<double>(storage_of(bf16).row_bytes(kDim));
  }

  void operator()(int i, Stream stream) {
    AttentionArgs args{
        .q = q_.view, .k = k_[i % copies()].view, .v = v_[i % copies()].view, .out = out_.view};
    if (batch_ > 1) {
      args.query_start = starts_on_.view();
      args.kv_len = lens_on_.view();
    } else {  // keys of the one sequence have no dimension for it
      args.total_keys = capacity_;
      for (Tensor* t : {&args.k, &args.v})
        *t = Tensor(t->data, bf16, {capacity_, kv_heads_, kDim}, t->device);
    }
    layer_->run(args, stream);
  }

  /// Rows of the last call, the `launches` - 1st.
  Judge judge(int launches) const {
    const Values k{seed((launches - 1) % copies()), bf16}, v{k.seed + 1, bf16};
    const std::vector<std::byte> result = out_.download();
    Judge found;
    for (int b : {0, batch_ / 2, batch_ - 1})
      for (int head : {0, heads_ - 1}) {
        const std::int64_t row = std::int64_t{b} * tokens_ + tokens_ - 1;  // sees every key
        const int kv_head = head / (heads_ / kv_heads_);
        const auto at = [&](std::int64_t j) {
          return ((b * capacity_ + j) * kv_heads_ + kv_head) * kDim;
        };
        const std::vector<double> exact = attend_exactly(
            0, lens_[b], kDim,
            [&](std::int64_t j) {
              double product = 0;
              for (int d = 0; d < kDim; ++d)
                product += q_.values((row * heads_ + head) * kDim + d) * k(at(j) + d);
              return product / std::sqrt(static_cast<double>(kDim));
            },
            [&](std::int64_t j, int d) { return v(at(j) + d); });
        for (int d = 0; d < kDim; ++d)
          found.compare(load_element(result.data(), bf16, (row * heads_ + head) * kDim + d),
                        exact[d]);
      }
    return found;
  }

 private:
  static constexpr int kDim = 128;
  static std::uint64_t seed(int copy) { return 100 + 2 * static_cast<std::uint64_t>(copy); }

  int heads_, kv_heads_, batch_, tokens_;
  std::int64_t capacity_ = 0, keys_ = 0;
  std::vector<std::int32_t> lens_;
  std::optional<Attention> layer_;
  Array q_, out_;
  std::vector<Array> k_, v_;
  Numbers<std::int32_t> starts_on_, lens_on_;
};

void layer_row(const Settings& s, const DecodeRow& row) {
  LayerDecode problem(s, row);
  const int launches = (5 + problem.copies() - 1) / problem.copies() * problem.copies();
  const Times t = times(s.device, std::ref(problem), effort(s, launches));
  const Judge judge = problem.judge(launches);
  print({{"section", "layer"},
         {"heads", row.heads},
         {"kv_heads", row.kv_heads},
         {"dim", 128},
         {"dtype", "bf16"},
         {"batch", row.batch},
         {"tokens", s.tokens},
         {"kv_len", row.kv_len},
         {"bytes", problem.bytes()},
         {"tb_s", rate(problem.bytes(), t)}},
        t, &judge, bf16);
}

}  // namespace

void layer(const Settings& s) {
  for (std::size_t r = 0; r < std::size(kLayer); ++r)
    if (s.takes(r)) attempt({{"section", "layer"}, {"row", r}}, [&] { layer_row(s, kLayer[r]); });
}

}  // namespace longspan::bench
