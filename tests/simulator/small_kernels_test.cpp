// Small cases of kernels beside attention and the exchange: the digest of arrays, the check of
// slots, the copy out of pages. Each has an exact expectation.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "kernels/cuda/cache/gather.hpp"
#include "kernels/digest.hpp"
#include "kernels/faults.hpp"
#include "tests/gpu/serving_ranks.hpp"

namespace longspan::tests {
namespace {

using kernels::DigestArray;

template <class T>
T* data_of(const Buffer& buffer) {
  return static_cast<T*>(buffer.data());
}

TEST(Digest, OfArraysOfAnyShape) {
  std::mt19937 random(fresh_seed());
  std::vector<std::byte> bytes(4096);
  for (std::byte& each : bytes) each = static_cast<std::byte>(random());
  const Buffer memory = on_device(Device::cuda, bytes);
  const auto array = [](const void* data, std::int64_t rows, std::int64_t columns,
                        std::int64_t pitch, int unit) {
    return DigestArray{
        .data = data, .columns = columns, .rows = rows, .pitch = pitch, .unit = unit};
  };
  const auto arrays_at = [&](const void* data) {
    return std::vector<DigestArray>{array(data, 1, 700, 700, 4), array(nullptr, 1, 0, 0, 4),
                                    array(data, 1, 1, 1, 8), array(data, 5, 90, 100, 2),
                                    array(data, 3, 300, 301, 1)};
  };
  const std::vector<DigestArray> arrays = arrays_at(memory.data()), host = arrays_at(bytes.data());
  const std::size_t count = arrays.size();
  const Buffer words = poisoned(Device::cuda, (count + 2) * sizeof(std::uint64_t));
  kernels::DigestParams p;
  std::copy(arrays.begin(), arrays.end(), p.arrays);
  p.count = static_cast<int>(count);
  p.words = data_of<std::uint64_t>(words);
  p.stamp = 77;
  kernels::cuda_backend()->digest(p, {});

  std::vector<std::uint64_t> expected;
  std::uint64_t all = 0;
  for (std::size_t n = 0; n < count; ++n) {
    std::uint64_t sum = 0;
    for (std::int64_t i = 0; i < host[n].size(); ++i)
      sum += kernels::mixed_element(i, host[n].bits(i));
    expected.push_back(sum);
    all += kernels::mixed_array(static_cast<int>(n), sum);
  }
  expected.insert(expected.end(), {all, p.stamp});
  EXPECT_EQ(on_host<std::uint64_t>(words, count + 2), expected);
}

/// Slots of an append, where neighbours are claimed in one word.
TEST(CheckSlots, EachIsClaimedOnce) {
  std::mt19937 random(fresh_seed());
  constexpr std::size_t kTokens = 300;
  std::vector<std::int64_t> slots(kTokens);
  std::iota(slots.begin(), slots.end(), 7);
  std::shuffle(slots.begin(), slots.end(), random);
  const auto found_in = [&] {
    constexpr std::int64_t kSlots = 400;
    const Buffer at = on_device(Device::cuda, slots),
                 claimed = on_device(Device::cuda, std::vector<std::uint32_t>(kSlots / 32 + 1)),
                 report = on_device(Device::cuda, std::vector<kernels::FaultReport>(1));
    kernels::CheckParams p;
    p.geometry.tokens = kTokens;
    p.geometry.shard.length = kTokens;
    p.is_append = true;
    p.slots = data_of<std::int64_t>(at);
    p.slot_count = kSlots;
    p.claimed = data_of<std::uint32_t>(claimed);
    p.report = data_of<kernels::FaultReport>(report);
    kernels::cuda_backend()->check_arrays(p, {});
    return on_host<kernels::FaultReport>(report, 1)[0];
  };
  EXPECT_EQ(static_cast<int>(found_in().fault), static_cast<int>(kernels::Fault::none));
  const std::size_t first = random() % kTokens, second = (first + 1 + random() % 200) % kTokens;
  slots[second] = slots[first];
  const kernels::FaultReport found = found_in();
  EXPECT_EQ(static_cast<int>(found.fault), static_cast<int>(kernels::Fault::overlap));
  EXPECT_TRUE(found.where == static_cast<int>(first) || found.where == static_cast<int>(second));
  EXPECT_EQ(found.value, slots[first]);
}

struct Gathered {
  const char* name;
  Serving s;
  std::int64_t capacity = 256;  // keys of a sequence
};
void PrintTo(const Gathered& gathered, std::ostream* out) { *out << gathered.name; }
class Gather : public ::testing::TestWithParam<Gathered> {};

/// The keys that a row sees are copied unchanged. Of the rest of the room, only the starts of
/// sequences and the ticket are written.
TEST_P(Gather, CopiesWhatIsSeen) {
  const auto& [name, s, capacity] = GetParam();
  const std::uint64_t seed = fresh_seed();
  SCOPED_TRACE(trace(s, {}, seed));
  const ServingProblem problem(s, seed);
  const ServingArrays arrays(Device::cuda, problem, Shard::contiguous(0, 0, 1));
  const Buffer new_k = on_device(Device::cuda, problem.new_rows(false)),
               new_v = on_device(Device::cuda, problem.new_rows(true));
  const std::int64_t row = std::int64_t{s.kv_heads} * s.dim;
  const std::size_t row_bytes = static_cast<std::size_t>(row) * size_of(s.dtype);
  const std::size_t half = static_cast<std::size_t>(s.batch() * capacity) * row_bytes;
  const Buffer room = poisoned(Device::cuda, 2 * half + 256);

  kernels::cuda::GatheredParams g;
  kernels::AttendParams& p = g.attend;
  p.dtype = p.q_dtype = p.kv_dtype = s.dtype;
  p.tokens = problem.tokens;
  p.heads = s.heads;
  p.kv_heads = s.kv_heads;
  p.head_dim = p.value_dim = s.dim;
  p.k = rows_of(arrays.k_tensor(), s, false);
  p.v = rows_of(arrays.v_tensor(), s, true);
  p.pages = {data_of<std::int32_t>(arrays.table),
             arrays.cache.row_stride,
             1,
             arrays.cache.columns,
             arrays.cache.pages,
             s.page};
  p.batch.size = s.batch();
  p.batch.query_start = data_of<std::int32_t>(arrays.query_start);
  p.batch.kv_len = data_of<std::int32_t>(arrays.kv_len);
  p.shard = arrays.shard;
  p.mask = s.mask;
  p.max_kv_len = problem.max_kv_len();
  if (s.separate_new) {
    g.new_k = {new_k.data(), row, s.dim};
    g.new_v = {new_v.data(), row, s.dim};
  }
  g.room = data_of<std::byte>(room);
  g.room_bytes = room.bytes();
  ASSERT_EQ(kernels::cuda::gather_capacity(p, g.room_bytes), capacity);
  const kernels::AttendParams gathered = kernels::cuda::gather_keys(g, nullptr);

  const std::vector<std::byte> found = on_host(room, room.bytes());
  for (const bool values : {false, true}) {
    std::vector<std::byte> expected(half, std::byte{0xff});
    for (int b = 0; b < s.batch(); ++b) {
      if (s.q_lens[b] == 0) continue;
      const std::int64_t begin = problem.visible(b, problem.context(b)).begin,
                         end = problem.visible(b, s.kv_lens[b] - 1).end;
      for (std::int64_t key = std::max<std::int64_t>(begin, 0); key < end; ++key)
        std::memcpy(expected.data() + static_cast<std::size_t>(b * capacity + key) * row_bytes,
                    (values ? problem.raw_v : problem.raw_k).data() +
                        static_cast<std::size_t>(problem.key_start[b] + key) * row_bytes,
                    row_bytes);
    }
    EXPECT_EQ(std::memcmp(found.data() + (values ? half : 0), expected.data(), half), 0)
        << (values ? "values" : "keys");
  }
  std::vector<std::int64_t> starts(static_cast<std::size_t>(s.batch()));
  std::memcpy(starts.data(), found.data() + 2 * half, starts.size() * sizeof starts[0]);
  for (int b = 0; b < s.batch(); ++b) EXPECT_EQ(starts[b], b * capacity);
  int ticket = -1;
  std::memcpy(&ticket, found.data() + (reinterpret_cast<std::byte*>(gathered.ticket) - g.room),
              sizeof ticket);
  EXPECT_EQ(ticket, 0);
}

const Gathered kGathered[] = {
    {"pages_of_16",
     {.heads = 2, .dim = 64, .dtype = DType::bf16, .q_lens = {20, 3}, .kv_lens = {150, 70}}},
    {"window_and_new_keys",
     {.heads = 2,
      .dim = 24,
      .dtype = DType::fp16,
      .q_lens = {20, 0, 40},
      .kv_lens = {200, 9, 41},
      .mask = {.causal = true, .window = 50},
      .page = 7,
      .separate_new = true}},
    {"keys_side_by_side",
     {.heads = 3,
      .kv_heads = 3,
      .dim = 40,
      .dtype = DType::bf16,
      .q_lens = {30, 2},
      .kv_lens = {201, 67},
      .x_packed = true}},
    // A block takes several heads only where there are many blocks.
    {"heads_in_turn",
     {.heads = 2,
      .dim = 16,
      .dtype = DType::fp16,
      .q_lens = {25},
      .kv_lens = {150},
      .x_packed = true},
     64 * 512},
};
std::string name_of_gathered(const ::testing::TestParamInfo<Gathered>& tested) {
  return tested.param.name;
}
INSTANTIATE_TEST_SUITE_P(All, Gather, ::testing::ValuesIn(kGathered), name_of_gathered);

}  // namespace
}  // namespace longspan::tests
