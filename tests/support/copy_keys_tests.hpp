// Copies keys and values of a cache of any form to rows side by side, on every device. Every byte
// must be in its place, nothing else is written, and only needed entries of a block table are read.
// Also the starts of sharded query rows.
#pragma once

#include "src/strategy/shared/node_ranks.hpp"
#include "tests/support/host_problem.hpp"
#include "tests/support/on_device.hpp"

namespace longspan::tests {

class CopyKeys : public OnDevice {
 protected:
  /// Local keys of every rank of the rule, by their order or by position, compared element by
  /// element. With `per_node` positions are those among the keys of that many neighbouring ranks.
  void expect_copied(const HostShape& shape, const Shard& rule, bool by_position,
                     int per_node = 0) {
    HostProblem problem(shape, static_cast<std::uint32_t>(below(1 << 30)));
    constexpr std::int64_t kGap = 3;
    for (const Shard& shard : HostProblem::on_all(rule)) {
      const NodeRanks node = per_node == 0 ? NodeRanks::all(shard.ranks)
                                           : NodeRanks::of(shard.rank, shard.ranks, per_node);
      const Shard part = part_of_node(shard, node);
      Local local = problem.local(shard);
      kernels::AttendParams p = problem.params(shard, {}, 0);
      local.give(p);
      const int batch = problem.batch();
      std::vector<std::int64_t> to_start;
      std::int64_t rows = 0;
      for (int b = 0; b < batch; ++b) {
        to_start.push_back(rows);
        rows += kGap + shape.kv_len[b];
      }
      const auto size = static_cast<std::int64_t>(size_of(problem.k.dtype));
      const std::int64_t row = std::int64_t{shape.kv_heads} * shape.dim * size;
      // The expected result: the needed keys in their rows, and 0xff everywhere else.
      std::vector<std::byte> expected_k(static_cast<std::size_t>(rows * row), std::byte{0xff}),
          expected_v = expected_k;
      const std::vector<std::vector<bool>> seen = problem.seen();
      for (int b = 0; b < batch; ++b) {
        const Shard own = shard.for_sequence(b);
        for (std::int64_t i = 0; i < own.local_len(shape.kv_len[b]); ++i) {
          const std::int64_t position = own.position(i, shape.kv_len[b]);
          if (shape.page > 0 &&
              !seen[static_cast<std::size_t>(b)][static_cast<std::size_t>(position)])
            continue;  // NaN in pages, 0xff all of it
          const std::int64_t to = (to_start[static_cast<std::size_t>(b)] +
                                   (by_position ? part.before(position, shape.kv_len[b]) : i)) *
                                  row,
                             from = (problem.key_start[b] + position) * problem.kv_stride() * size;
          std::memcpy(expected_k.data() + to, problem.k.bytes.data() + from,
                      static_cast<std::size_t>(row));
          std::memcpy(expected_v.data() + to, problem.v.bytes.data() + from,
                      static_cast<std::size_t>(row));
        }
      }
      const auto k = on_device(local.k.bytes), v = on_device(local.v.bytes);
      const auto table = on_device(local.table);
      const auto key_start = on_device(local.start), starts = on_device(to_start);
      const auto query_start = on_device(problem.query_start), kv_len = on_device(shape.kv_len);
      const auto positions =
          rule.layout == Layout::ranges
              ? on_device(std::vector<std::int64_t>(
                    rule.table, rule.table + std::int64_t{batch} * (rule.ranks + 1)))
              : DeviceArray<std::int64_t>();
      const auto to_k = poisoned<std::byte>(expected_k.size()),
                 to_v = poisoned<std::byte>(expected_v.size());
      kernels::CopyKeysParams copy;
      copy.geometry = p;
      copy.geometry.batch.query_start = query_start.data();
      copy.geometry.batch.kv_len = kv_len.data();
      copy.geometry.batch.key_start = key_start.data();
      if (rule.layout == Layout::ranges) copy.geometry.shard.table = positions.data();
      copy.k = p.k;
      copy.v = p.v;
      copy.k.data = k.data();
      copy.v.data = v.data();
      copy.pages = p.pages;
      if (p.pages) copy.pages.table = table.data();
      copy.to_k = to_k.data();
      copy.to_v = to_v.data();
      copy.to_start = starts.data();
      copy.by_position = by_position;
      copy.part = part;
      copy.rows = rows;
      copy.longest = *std::max_element(shape.kv_len.begin(), shape.kv_len.end());
      backend().copy_keys(copy, {});
      EXPECT_TRUE(to_k.values() == expected_k) << "keys of rank " << shard.rank;
      EXPECT_TRUE(to_v.values() == expected_v) << "values of rank " << shard.rank;

      copy.to_v = nullptr;  // keys only, and no further than the room
      copy.rows = rows / 2;
      std::fill(expected_k.begin() + rows / 2 * row, expected_k.end(), std::byte{0xff});
      const auto half = poisoned<std::byte>(expected_k.size());
      copy.to_k = half.data();
      backend().copy_keys(copy, {});
      EXPECT_TRUE(half.values() == expected_k) << "half the keys of rank " << shard.rank;
    }
  }

  HostShape shape(DType dtype, int dim, int page, Store store) {
    HostShape s{.heads = 4, .kv_heads = 2, .dim = dim, .dtype = DType::fp32};
    if (dtype == DType::fp32 || is_fp8(dtype))
      s.kv_dtype = dtype;
    else
      s.dtype = dtype;
    s.page = page;
    s.store = store;
    s.query_len = {3, 0, 1, 20};
    s.kv_len = {static_cast<std::int32_t>(100 + below(60)), 40, 0,
                static_cast<std::int32_t>(20 + below(30))};
    // The first and the last sequence need only some keys, and the second none.
    s.mask = {.causal = true, .window = 30};
    return s;
  }
};

TEST_F(CopyKeys, OfEveryTypeOutOfEveryForm) {
  for (const DType dtype : {DType::fp32, DType::bf16, DType::e4m3})
    for (const int dim : {8, 24, 64})
      for (const Store store : {Store::rows, Store::x_packed, Store::odd})
        for (const int page : {0, 1, 16}) {
          if (page == 0 && store != Store::rows) continue;
          SCOPED_TRACE(std::string(name(dtype)) + " dim " + std::to_string(dim) + " page " +
                       std::to_string(page) + " store " + std::to_string(static_cast<int>(store)));
          expect_copied(shape(dtype, dim, page, store), Shard::contiguous(0, 0, 1), dim == 24);
        }
}

TEST_F(CopyKeys, OfEveryShardInItsOrderAndByPosition) {
  const HostShape plain = shape(DType::fp32, 16, 0, Store::rows),
                  paged = shape(DType::fp16, 16, 16, Store::rows);
  for (const HostShape& s : {plain, paged}) {
    std::vector<std::int64_t> table;
    for (const std::int64_t n : s.kv_len) table.insert(table.end(), {0, n / 3, n / 3, n});
    for (const Shard& rule :
         {Shard::contiguous(0, 0, 3), Shard::zigzag(0, 0, 3), Shard::striped(0, 0, 3),
          Shard::interleaved(0, 0, 3, 16), Shard::ranges(0, 0, 3, table.data())})
      for (const bool by_position : {false, true}) {
        SCOPED_TRACE(std::string(name(rule.layout)) + (by_position ? " by position" : ""));
        expect_copied(s, rule, by_position);
      }
    for (const Shard& rule : {Shard::contiguous(0, 0, 6), Shard::zigzag(0, 0, 6),
                              Shard::striped(0, 0, 6), Shard::interleaved(0, 0, 6, 16)})
      for (const int per_node : {2, 3}) {
        SCOPED_TRACE(std::string(name(rule.layout)) + " nodes of " + std::to_string(per_node));
        expect_copied(s, rule, true, per_node);
      }
  }
}

TEST_F(CopyKeys, StartsOfSharedRowsAddUp) {
  for (const int batch : {1, 5, 300}) {
    std::vector<std::int32_t> whole{0};
    for (int b = 0; b < batch; ++b)
      whole.push_back(whole.back() + static_cast<std::int32_t>(below(20)));
    const auto starts = on_device(whole);
    for (int rank = 0; rank < 3; ++rank)
      for (const Shard& shard : {Shard::zigzag(0, rank, 3), Shard::striped(0, rank, 3)}) {
        std::vector<std::int32_t> expected{0};
        for (int b = 0; b < batch; ++b) {
          std::int32_t own = 0;  // counted one by one
          for (std::int64_t i = 0; i < whole[b + 1] - whole[b]; ++i)
            own += shard.owns(i, whole[b + 1] - whole[b]);
          expected.push_back(expected.back() + own);
        }
        const auto found = poisoned<std::int32_t>(expected.size());
        const std::int32_t all = expected.back();
        backend().row_starts({shard, starts.data(), batch, found.data(), all}, {});
        EXPECT_EQ(found.values(), expected) << name(shard.layout) << " rank " << rank;
        for (std::int32_t& start : expected) start = std::min(start, all / 2);
        backend().row_starts({shard, starts.data(), batch, found.data(), all / 2}, {});
        EXPECT_EQ(found.values(), expected) << "with half the rows";
      }
  }
}

}  // namespace longspan::tests
