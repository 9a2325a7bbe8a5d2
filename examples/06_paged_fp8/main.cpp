// Serving from a cache that is paged, sharded and quantised: two sequences of different lengths get
// their prompts, decode, and have a tree of draft tokens verified in one step.
//
// Blocks of 128 keys are dealt out to the ranks in turn. Every rank has its own pages and block
// table, takes a page when a sequence needs one, and keeps the keys at its own positions. Queries
// and new tokens are on all ranks. With an argument "cuda": on GPUs.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <longspan/longspan.hpp>

namespace {

using longspan::bf16, longspan::e4m3, longspan::fp32;
using longspan::Buffer, longspan::Device, longspan::Tensor;
constexpr longspan::DType int32 = longspan::DType::int32;

constexpr int kHeads = 8, kKvHeads = 2, kDim = 64, kPage = 16, kBatch = 2;
constexpr int kDrafts = 3;  // in the tree
constexpr std::int32_t kPrompts[kBatch] = {300, 1'000};
constexpr std::int64_t kMaxLen = 1'100, kColumns = kMaxLen / kPage + 1;
constexpr float kScale = 1.0f / 64;  // of the cache: a stored x means x / 64
constexpr std::int64_t kRow = kKvHeads * kDim;
constexpr int kSkipped = 77;  // what ctest takes for "not run here"

template <class T>
Buffer upload(Device device, const std::vector<T>& values) {
  Buffer buffer(device, values.size() * sizeof(T));
  buffer.upload(values.data());
  return buffer;
}

using Bits = std::vector<std::uint16_t>;  // bf16

/// The model's result for a token: the same on every rank.
void add_random(Bits& rows, std::int64_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  rows.resize(rows.size() + n);
  for (auto i = static_cast<std::int64_t>(rows.size()) - n; n > 0; ++i, --n)
    longspan::store_element(rows.data(), bf16, i, normal(random));
}

/// New tokens of both sequences: token `id[b][t]` is the t-th of sequence b.
struct Tokens {
  std::vector<std::int32_t> start{0};
  Bits q, k, v;

  explicit Tokens(const std::vector<std::vector<unsigned>>& id) {
    for (unsigned b = 0; b < id.size(); ++b) {
      for (unsigned token : id[b]) {
        add_random(q, kHeads * kDim, 3 * (token * kBatch + b));
        add_random(k, kRow, 3 * (token * kBatch + b) + 1);
        add_random(v, kRow, 3 * (token * kBatch + b) + 2);
      }
      start.push_back(start.back() + static_cast<std::int32_t>(id[b].size()));
    }
  }
  std::int64_t count() const { return start.back(); }
};

/// One rank's pages and, for each sequence, the pages of its keys.
class Cache {
 public:
  Cache(Device device, const longspan::Shard& shard)
      : pages_(kBatch * ((shard.max_local_len(kMaxLen) + kPage - 1) / kPage)),
        k_(device, pages_ * kPage * kRow),
        v_(device, pages_ * kPage * kRow),
        table_(kBatch * kColumns, -1),
        used_(kBatch, 0) {}

  /// Takes pages until each sequence has room for the keys that this rank holds of it.
  void grow(const longspan::Shard& shard, const std::vector<std::int32_t>& lengths) {
    for (int b = 0; b < kBatch; ++b)
      while (used_[b] * kPage < shard.local_len(lengths[b]))
        table_[b * kColumns + used_[b]++] = next_++;
  }

  const std::vector<std::int32_t>& table() const { return table_; }
  Tensor keys() const { return tensor(k_); }
  Tensor values() const { return tensor(v_); }

 private:
  Tensor tensor(const Buffer& memory) const {
    return Tensor(memory.data(), e4m3, {pages_, kPage, kKvHeads, kDim}, memory.device());
  }

  std::int64_t pages_;
  Buffer k_, v_;
  std::vector<std::int32_t> table_;  // [batch, columns]
  std::vector<std::int64_t> used_;   // pages of each sequence
  std::int32_t next_ = 0;
};

/// A communicator, its cache and its layer.
class Server {
 public:
  explicit Server(const longspan::Communicator& world)
      : device_(world.device()),
        layer_(
            world,
            {.heads = kHeads,
             .kv_heads = kKvHeads,
             .head_dim = kDim,
             .dtypes = {.compute = bf16, .kv = e4m3},
             .mask = {.causal = true},
             .limits = {.max_tokens = kBatch * kDrafts, .max_batch = kBatch, .max_kv_len = kMaxLen},
             .keys = {longspan::Layout::interleaved},
             .debug = {.check_arrays = true}}),
        shard_(layer_.shard(kMaxLen)),
        cache_(device_, shard_),
        scale_(upload(device_, std::vector<float>{kScale})) {}

  // [step]
  /// Puts the tokens at the end of their sequences, which then have `lengths` keys, and attends
  /// from each of them. The prompts are only stored: this example has no use for their result.
  Bits step(const Tokens& tokens, const std::vector<std::int32_t>& lengths, const Tensor& tree = {},
            bool attend = true) {
    cache_.grow(shard_, lengths);
    const Buffer q = upload(device_, tokens.q), k = upload(device_, tokens.k),
                 v = upload(device_, tokens.v), start = upload(device_, tokens.start),
                 lens = upload(device_, lengths), table = upload(device_, cache_.table());
    const auto rows = [&](const Buffer& memory, int heads) {
      return Tensor(memory.data(), bf16, {tokens.count(), heads, kDim}, device_);
    };
    const Tensor scale(scale_.data(), fp32, {1}, device_),
        pages(table.data(), int32, {kBatch, kColumns}, device_),
        query_start(start.data(), int32, {kBatch + 1}, device_),
        kv_len(lens.data(), int32, {kBatch}, device_);

    layer_.append({.new_k = rows(k, kKvHeads),
                   .new_v = rows(v, kKvHeads),
                   .k = cache_.keys(),
                   .v = cache_.values(),
                   .query_start = query_start,
                   .kv_len = kv_len,
                   .block_table = pages,
                   .k_scale = scale,
                   .v_scale = scale});
    Bits out(tokens.q.size(), 0xffff);  // NaN
    const Buffer result = upload(device_, out);
    if (attend)
      layer_.run({.q = rows(q, kHeads),
                  .k = cache_.keys(),
                  .v = cache_.values(),
                  .out = rows(result, kHeads),
                  .query_start = query_start,
                  .kv_len = kv_len,
                  .block_table = pages,
                  .k_scale = scale,
                  .v_scale = scale,
                  .qq_bias = tree});
    layer_.wait();
    result.download(out.data());
    return out;
  }
  // [/step]

  Device device() const { return device_; }
  const longspan::Shard& shard() const { return shard_; }

 private:
  Device device_;
  longspan::Attention layer_;
  longspan::Shard shard_;
  Cache cache_;
  Buffer scale_;
};

/// Results of a decode step, of the draft tree, and of the accepted branch decoded again.
struct Results {
  std::vector<Bits> decoded;
  Bits drafts, again;
};

Results serve(Server& server) {
  std::vector<std::int32_t> lengths(kPrompts, kPrompts + kBatch);
  std::vector<std::vector<unsigned>> id(kBatch);
  for (int b = 0; b < kBatch; ++b)
    for (std::int32_t i = 0; i < kPrompts[b]; ++i) id[b].push_back(i);
  server.step(Tokens(id), lengths, {}, false);

  Results results;
  const auto grow_by = [&](std::int32_t n) {
    for (std::int32_t& length : lengths) length += n;
  };
  for (unsigned step = 0; step < 40; ++step) {
    grow_by(1);
    results.decoded.push_back(server.step(Tokens({{2000 + step}, {2000 + step}}), lengths));
  }

  // [tree]
  // Three drafts: a token, and two candidates for the one behind it, which must not see each other.
  const float hidden = -std::numeric_limits<float>::infinity();
  const Buffer tree = upload(server.device(), std::vector<float>{0, hidden, hidden,  //
                                                                 0, 0, hidden,       //
                                                                 0, hidden, 0});
  grow_by(kDrafts);
  results.drafts = server.step(Tokens({{3000, 3001, 3002}, {3000, 3001, 3002}}), lengths,
                               Tensor(tree.data(), fp32, {kDrafts, kDrafts}, tree.device()));
  // The second candidate is accepted: it takes the place of the first, whose key is overwritten.
  grow_by(-1);
  results.again = server.step(Tokens({{3002}, {3002}}), lengths);
  // [/tree]
  return results;
}

/// Largest difference of n elements; infinity where one is NaN.
double difference(const std::uint16_t* a, const std::uint16_t* b, std::int64_t n) {
  double worst = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const double d =
        std::fabs(longspan::load_element(a, bf16, i) - longspan::load_element(b, bf16, i));
    worst = std::isnan(d) ? INFINITY : std::fmax(worst, d);
  }
  return worst;
}

int run(Device device) {
  // MPI ends with the last communicator, so this one lives as long as those of the GPUs.
  const longspan::Communicator cpus = longspan::from_environment({.device = Device::host});
  if (device == Device::cuda && longspan::gpu_count() < cpus.size()) {
    std::printf("skipped: more ranks than the %d GPUs here\n", longspan::gpu_count());
    return kSkipped;
  }
  const longspan::Communicator world = longspan::from_environment({.device = device});
  world.make_current();  // for the tensors that are made here
  Server sharded(world), alone(longspan::self(device));
  const Results a = serve(sharded), b = serve(alone);

  double worst = difference(a.drafts.data(), b.drafts.data(), b.drafts.size());
  int same = a.drafts == b.drafts;
  for (std::size_t i = 0; i < a.decoded.size(); ++i) {
    worst =
        std::fmax(worst, difference(a.decoded[i].data(), b.decoded[i].data(), b.decoded[i].size()));
    same += a.decoded[i] == b.decoded[i];
  }
  // Verified in the tree or decoded by itself, the accepted token has the same result.
  double verified = 0;
  for (std::int64_t s = 0; s < kBatch; ++s)
    verified = std::fmax(verified, difference(&a.drafts[(s * kDrafts + 2) * kHeads * kDim],
                                              &a.again[s * kHeads * kDim], kHeads * kDim));

  const int steps = static_cast<int>(a.decoded.size()) + 1;
  const bool keeps = sharded.shard().keeps_order();
  const double bound = 1e-3;  // two neighbouring bf16 numbers below 1/4
  const bool right = (keeps ? same == steps : worst <= bound) && verified <= bound;
  if (world.rank() == 0)
    std::printf(
        "%d steps on %d ranks (%s): %d with the bits of one process, largest difference "
        "%.1e; drafts against decoding %.1e, %s\n",
        steps, world.size(), name(device), same, worst, verified, right ? "right" : "WRONG");
  return right ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc > 1 && std::string(argv[1]) == "cuda" ? Device::cuda : Device::host);
  } catch (const longspan::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return static_cast<int>(error.kind());
  }
}
