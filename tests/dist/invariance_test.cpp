// The output bits of a sequence depend only on the sequence: not on how many ranks hold its keys,
// which other sequences are in the batch and in which order, the sizes of the layer, the way of
// states, or whether the run is a replayed graph.
//
// The tests use a pool of random sequences. Each of them alone on one rank gives the bits that all
// batches drawn from the pool must repeat, on 1, 2, 4 ranks and on the whole world at once: the
// first ranks of a world of 7 are worlds too. Shards that are not cuts of the fixed order's tree
// (Shard::keeps_order), which those of 3 and 7 ranks never are, promise their bits for one number
// of ranks only: there batches are compared with the sequence alone on the same ranks.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "tests/dist/replay.hpp"
#include "tests/dist/world.hpp"
#include "tests/support/message.hpp"
#include "tests/support/serving_run.hpp"
#include "tests/support/simulated.hpp"

namespace longspan::tests {
namespace {

constexpr std::int32_t kShort = 16;  // longest query that keeps the fixed order on GPUs by default

/// The first `size` ranks of a larger world, as a world of their own; other ranks have none.
class FirstRanks {
 public:
  explicit FirstRanks(int size) {
    int rank = 0, ranks = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (ranks <= size) return;
    MPI_Comm_split(MPI_COMM_WORLD, rank < size ? 0 : MPI_UNDEFINED, rank, &comm_);
    if (comm_ == MPI_COMM_NULL) return;
    world_ = from_mpi(comm_, {.device = wants_gpus() ? Device::cuda : Device::host});
    world_->make_current();
  }
  ~FirstRanks() {
    world_.reset();
    if (comm_ != MPI_COMM_NULL) MPI_Comm_free(&comm_);
  }
  FirstRanks(const FirstRanks&) = delete;
  FirstRanks& operator=(const FirstRanks&) = delete;

  const std::optional<Communicator>& world() const { return world_; }

 private:
  MPI_Comm comm_ = MPI_COMM_NULL;
  std::optional<Communicator> world_;
};

/// A batch from the pool, and other settings that must not change a bit.
struct Plan {
  std::vector<int> sequences;
  std::int64_t spare = 0;  // by how much the layer's limits exceed the batch
  bool unknown = false;    // lengths are not promised at all
  bool replays = false;
  int threads = 1;  // on the host: they cut the work, which decides the order of folding
};

/// A pool and the draws from it.
struct Subject {
  std::vector<ServingProblem> alone;  // each sequence of the pool
  std::vector<Plan> plans;
  std::vector<ServingProblem> batches;  // of the plans

  Subject(const ServingProblem& pool, std::vector<Plan> drawn) : plans(std::move(drawn)) {
    for (int b = 0; b < pool.shape.batch(); ++b) alone.push_back(pool.pick({b}));
    for (const Plan& plan : plans) batches.push_back(pool.pick(plan.sequences));
  }
};

struct Deal {
  Layout layout;
  std::int64_t block;
};

std::string bits_of(const ServingProblem& p, const ServingResult& result, int at) {
  const std::size_t heads = p.shape.heads, row = heads * p.shape.dim * size_of(p.shape.of_out());
  const std::size_t first = p.query_start[at], rows = p.query_start[at + 1] - first;
  std::string bits(reinterpret_cast<const char*>(result.out.data()) + first * row, rows * row);
  bits.append(reinterpret_cast<const char*>(result.lse.data() + first * heads),
              rows * heads * sizeof(float));
  return bits;
}

Options options_for(const ServingProblem& p, const Plan& plan, Device device) {
  Options o = options_for(p);
  o.invariant = device == Device::cuda && p.max_q_len() > kShort;
  // Without `invariant` auto may choose, for a sequence alone, a strategy that folds in another
  // order.
  if (!o.invariant) o.strategy = "gather-states";
  o.threads = plan.threads;
  o.limits.max_tokens += plan.spare;
  o.limits.max_batch += static_cast<int>(plan.spare);
  o.limits.max_kv_len = plan.unknown ? 0 : o.limits.max_kv_len + 100 * plan.spare;
  // A bound past the short queries would select the kernels of long ones, which changes nothing.
  o.limits.max_query_len = plan.unknown ? 0 : o.limits.max_query_len + plan.spare;
  return o;
}

/// Every run of a fresh layer: eager, then again.
std::vector<ServingResult> run(const Communicator& world, const ServingProblem& p, const Plan& plan,
                               const Deal& deal, Exchange exchange) {
  const Shard shard{deal.layout, world.rank(), world.size(), p.shape.kv_lens[0], deal.block};
  ServingArrays arrays(world.device(), p, shard);
  Options options = options_for(p, plan, world.device());
  options.exchange = exchange;
  options.keys = rule_of(shard);
  Attention layer(world, options);
  const AttentionArgs args = arrays.args();
  Replay replay(world.device(), [&](Stream stream) { layer.run(args, stream); });
  std::vector<ServingResult> results;
  for (int turn = 0; turn < (plan.replays ? 3 : 1); ++turn) {
    for (Buffer* buffer : {&arrays.out, &arrays.lse})
      buffer->upload(std::vector<std::byte>(buffer->bytes(), std::byte{0xff}).data());
    turn == 0 ? replay.eager() : replay.again();
    layer.wait(replay.stream());
    results.push_back(arrays.result());
  }
  return results;
}

class Invariance : public ::testing::Test {
 protected:
  /// Random problems whose sequences have from `least` to `most` queries.
  void check(int problems, std::int32_t least, std::int32_t most, bool fp8 = false);

 private:
  std::int64_t below(std::int64_t n) { return static_cast<std::int64_t>(random_() % n); }
  bool one_in(int n) { return below(n) == 0; }

  Serving draw(int turn, std::int32_t least, std::int32_t most, bool fp8);
  std::vector<Plan> draw_plans();
  void check_deal(const Subject& subject, const Deal& deal);
  bool by_peer_buffers(const Communicator& world);
  std::vector<std::string> each_alone(const Communicator& world, const Subject& subject,
                                      const Deal& deal);
  void expect_bits(const Communicator& world, const ServingProblem& batch, const Plan& plan,
                   const Deal& deal, const std::vector<std::string>& expected);

  static constexpr int kPool = 6;
  const Communicator world_ = test_world();
  const Communicator alone_ = self(world_.device());
  const FirstRanks two_{2}, four_{4};
  std::map<int, bool> by_peer_buffers_;  // by ranks
  const std::uint64_t seed_ = shared_seed(world_);
  std::mt19937_64 random_{seed_};  // alike on every rank
};

Serving Invariance::draw(int turn, std::int32_t least, std::int32_t most, bool fp8) {
  constexpr DType kTypes[] = {DType::bf16, DType::fp32, DType::fp16};
  constexpr int kDims[] = {64, 128, 80}, kGroups[] = {1, 2, 4, 5}, kPages[] = {0, 16, 48, 128};
  Serving s;
  s.dtype = kTypes[turn % 3];
  if (fp8) s.kv_dtype = one_in(2) ? DType::e4m3 : DType::e5m2;
  s.per_head_scales = fp8 && one_in(2);
  s.dim = kDims[below(3)];
  s.kv_heads = 1 + static_cast<int>(below(2));
  s.heads = s.kv_heads * kGroups[below(4)];
  s.page = kPages[below(4)];
  s.sinks = one_in(3);
  if (one_in(4)) s.softcap = 3.0f;
  if (one_in(4)) s.mask.window = 1 + below(1500);
  if (one_in(4)) s.alibi = one_in(2) ? Alibi::context : Alibi::query;
  s.qq_bias = most > 1 && most <= kShort && one_in(3);
  // One segment, a few, a whole number of them; and one with more than one in a virtual rank.
  const std::int64_t keys[kPool] = {
      1 + below(kSegment), below(600),       kSegment * (1 + below(8)),
      1000 + below(2000),  600 + below(600), turn % 2 == 0 ? 8200 + below(5000) : below(3000)};
  s.q_lens.clear();
  s.kv_lens.clear();
  for (std::int64_t n : keys) {
    if (kSimulated && (n < 8192 || most > 1 || fp8)) n = n / 4;  // time
    s.q_lens.push_back(least + static_cast<std::int32_t>(below(most - least + 1)));
    s.kv_lens.push_back(static_cast<std::int32_t>(n));
  }
  if (one_in(3)) {
    for (int b = 0; b < kPool; ++b) s.causal.push_back(one_in(3) ? 0 : 1);
  }
  return s;
}

/// The pool in order; in another order; two batches that have some of it, perhaps twice; one alone.
std::vector<Plan> Invariance::draw_plans() {
  std::vector<int> order(kPool);
  std::iota(order.begin(), order.end(), 0);
  std::vector<Plan> plans{{order, 0, false, true}};
  std::shuffle(order.begin(), order.end(), random_);
  plans.push_back({order});
  for (int i = 0; i < (kSimulated ? 1 : 2); ++i) {
    std::vector<int> some(2 + below(3));
    for (int& b : some) b = static_cast<int>(below(kPool));
    plans.push_back({some, 1 + below(90), i == 1, false, 2 + i});
  }
  plans.push_back({{static_cast<int>(below(kPool))}, 1 + below(90), one_in(2), false, 4});
  return plans;
}

/// Whether states can travel by peer buffers there.
bool Invariance::by_peer_buffers(const Communicator& world) {
  const auto [found, is_new] = by_peer_buffers_.try_emplace(world.size());
  if (is_new)
    found->second =
        Attention(world, {.heads = 1, .kv_heads = 1, .head_dim = 64}).exchange().has_peer_buffers();
  return found->second;
}

void Invariance::expect_bits(const Communicator& world, const ServingProblem& batch,
                             const Plan& plan, const Deal& deal,
                             const std::vector<std::string>& expected) {
  // The ways of states between GPUs; without peer buffers they are the same.
  std::vector<Exchange> exchanges{Exchange::automatic};
  if (world.device() == Device::cuda && world.size() > 1) {
    exchanges.push_back(Exchange::gather);
    if (by_peer_buffers(world)) exchanges.push_back(Exchange::peer_buffers_apart);
  }
  for (const Exchange exchange : exchanges) {
    const std::vector<ServingResult> results = run(world, batch, plan, deal, exchange);
    for (std::size_t turn = 0; turn < results.size(); ++turn)
      for (int at = 0; at < batch.shape.batch(); ++at)
        EXPECT_TRUE(bits_of(batch, results[turn], at) == expected[plan.sequences[at]])
            << "other bits: " << world.size() << " ranks, exchange " << name(exchange) << ", run "
            << turn << ", sequences " << fmt::to_string(fmt::join(plan.sequences, " "))
            << ", the one at " << at << ", threads " << plan.threads << ", layer made for "
            << plan.spare << " more" << (plan.unknown ? " and lengths unknown" : "");
  }
}

std::vector<std::string> Invariance::each_alone(const Communicator& world, const Subject& subject,
                                                const Deal& deal) {
  std::vector<std::string> bits;
  for (const ServingProblem& one : subject.alone) {
    const ServingResult result = run(world, one, {}, deal, Exchange::automatic).front();
    if (world_.rank() == 0) {  // the others are compared with it
      const Verdict verdict = judge(one, result.out, result.lse, one.all_rows(), one.tolerance(),
                                    /*sampled=*/1);
      EXPECT_EQ(verdict.wrong, 0) << verdict.first;
    }
    bits.push_back(bits_of(one, result, 0));
  }
  return bits;
}

void Invariance::check_deal(const Subject& subject, const Deal& deal) {
  std::vector<const Communicator*> worlds{&alone_};
  for (const FirstRanks* some : {&two_, &four_})
    if (some->world()) worlds.push_back(&*some->world());
  if (world_.size() > 1) worlds.push_back(&world_);
  const std::vector<std::string> on_one = each_alone(alone_, subject, deal);
  for (const Communicator* world : worlds) {
    const bool keeps = Shard{deal.layout, 0, world->size(), 0, deal.block}.keeps_order();
    const std::vector<std::string> expected = keeps ? on_one : each_alone(*world, subject, deal);
    for (std::size_t i = 0; i < subject.plans.size(); ++i)
      expect_bits(*world, subject.batches[i], subject.plans[i], deal, expected);
    std::string mine;
    for (const std::string& bits : expected) mine += bits;
    for (const std::string& theirs : world->gather(mine, "comparison"))
      EXPECT_TRUE(theirs == mine) << "ranks got different bits";
  }
}

void Invariance::check(int problems, std::int32_t least, std::int32_t most, bool fp8) {
  if (kSimulated) problems = 1;  // time; other seeds draw others
  for (int turn = 0; turn < problems; ++turn) {
    const Serving shape = draw(turn, least, most, fp8);
    const Subject subject(ServingProblem(shape, seed_ + turn), draw_plans());
    constexpr Deal kOther[] = {
        {Layout::zigzag, kSegment}, {Layout::striped, kSegment}, {Layout::interleaved, 16}};
    std::vector<Deal> deals{{Layout::contiguous, kSegment},
                            {Layout::interleaved, kSegment * (1 + turn % 2)}};
    if (turn == 0) deals.push_back(kOther[below(3)]);
    if (kSimulated) deals = {deals[static_cast<std::size_t>(below(std::ssize(deals)))]};
    for (const Deal& deal : deals) {
      SCOPED_TRACE(describe(shape) + " | " + name(deal.layout) + " " + std::to_string(deal.block) +
                   " seed " + std::to_string(seed_));
      check_deal(subject, deal);
    }
  }
}

TEST_F(Invariance, Decode) { check(3, 1, 1); }
TEST_F(Invariance, Drafts) { check(3, 2, 8); }
TEST_F(Invariance, ShortOnes) { check(2, 0, kShort); }
TEST_F(Invariance, Chunks) { check(2, kShort + 1, 60); }
TEST_F(Invariance, Mixed) { check(3, 1, 40); }
TEST_F(Invariance, Fp8Cache) {
  check(3, 1, 1, true);
  check(1, 2, 30, true);
}

}  // namespace
}  // namespace longspan::tests
