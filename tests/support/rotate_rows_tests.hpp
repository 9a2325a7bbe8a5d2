// Rotated query rows (longspan/rope.hpp), on every device, compared with float64.
#pragma once

#include <numeric>

#include "launcher/judge/oracle.hpp"
#include "src/layer/rotation.hpp"
#include "tests/support/on_device.hpp"
#include "tests/support/rope_tables.hpp"

namespace longspan::tests {

struct RotateCase {
  RopeOptions rope = {.dim = 64};
  std::optional<DType> tables = {};
  DType dtype = DType::bf16;
  int heads = 3, dim = 64;
  int gap = 0, offset = 0;  // elements between rows and heads; ahead of the first
  Shard queries = {};       // this rank's share of the rows
  std::vector<std::int32_t> query_len = {3, 0, 20, 1, 4}, kv_len = {100, 7, 20, 65, 2};
};

inline std::ostream& operator<<(std::ostream& out, const RotateCase& c) {
  return out << name(c.dtype) << " dim " << c.dim << " rope " << c.rope.dim
             << (c.rope.interleaved ? " interleaved" : "") << (c.tables ? " by tables" : "")
             << " gap " << c.gap << " offset " << c.offset << " " << name(c.queries.layout);
}

class RotateRows : public OnDevice {
 protected:
  void expect_right(const RotateCase& c) {
    const int batch = static_cast<int>(c.kv_len.size());
    std::vector<std::int32_t> whole{0}, starts{0};
    std::vector<std::int64_t> positions;  // of this rank's rows
    for (int b = 0; b < batch; ++b) {
      const Shard own = c.queries.for_sequence(b);
      whole.push_back(whole.back() + c.query_len[b]);
      for (std::int64_t t = 0; t < own.local_len(c.query_len[b]); ++t)
        positions.push_back(c.kv_len[b] - c.query_len[b] + own.position(t, c.query_len[b]));
      starts.push_back(static_cast<std::int32_t>(positions.size()));
    }
    const std::int64_t rows = starts.back(), tokens = rows + 2;  // two past the last sequence
    const std::int64_t width = c.dim + c.gap, row = c.heads * width + c.gap;
    Array from(c.dtype, c.offset + tokens * row);
    for (std::int64_t i = 0; i < c.offset + tokens * row; ++i) from.set(i, normal());

    kernels::RotateParams p;
    p.geometry.dtype = p.geometry.q_dtype = c.dtype;
    p.geometry.tokens = tokens;
    p.geometry.heads = c.heads;
    p.geometry.head_dim = c.dim;
    const auto query_start = on_device(starts), whole_start = on_device(whole),
               kv_len = on_device(c.kv_len);
    p.geometry.batch.size = batch;
    p.geometry.batch.query_start = query_start.data();
    p.geometry.batch.kv_len = kv_len.data();
    p.geometry.queries = c.queries;
    if (c.queries.ranks > 1) p.geometry.batch.whole_query_start = whole_start.data();
    const auto source = on_device(from.bytes);
    const auto to = poisoned<std::byte>(tokens * c.heads * c.dim * size_of(c.dtype));
    p.from = kernels::Rows{source.data() + c.offset * size_of(c.dtype), row, width};
    p.to = {to.data(), std::int64_t{c.heads} * c.dim, c.dim};
    const auto turns = on_device(turns_of(c.rope));
    p.rope.dim = c.rope.dim;
    p.rope.interleaved = c.rope.interleaved;
    p.rope.turns = turns.data();
    std::optional<RopeTables> tables;
    DeviceArray<std::byte> cos, sin;
    if (c.tables) {
      tables.emplace(c.rope, *std::max_element(c.kv_len.begin(), c.kv_len.end()), *c.tables);
      cos = on_device(tables->cos.bytes);
      sin = on_device(tables->sin.bytes);
      const std::int64_t stride = tables->pairs + RopeTables::kGap;
      p.rope.cos = {{cos.data(), *c.tables}, stride};
      p.rope.sin = {{sin.data(), *c.tables}, stride};
      p.rope.positions = tables->positions;
    }
    backend().rotate_rows(p, {});

    Array got(c.dtype, tokens * c.heads * c.dim);
    got.bytes = to.values();
    for (std::int64_t t = 0; t < tokens; ++t)
      for (int h = 0; h < c.heads; ++h) {
        Eigen::VectorXd exact(c.dim);
        for (int d = 0; d < c.dim; ++d) exact[d] = from[c.offset + t * row + h * width + d];
        const double size = exact.cwiseAbs().maxCoeff();
        if (t < rows && tables)
          launcher::rotate_exactly(exact, c.rope,
                                   [&](int i) { return tables->at(positions[t], i); });
        else if (t < rows)
          launcher::rotate_exactly(exact, c.rope, positions[t]);
        for (int d = 0; d < c.dim; ++d) {
          const double found = got[(t * c.heads + h) * c.dim + d];
          if (t >= rows)
            ASSERT_TRUE(std::isnan(found)) << "written past the last sequence: " << c;
          else if (d >= c.rope.dim)
            ASSERT_EQ(found, exact[d]) << c;
          else
            ASSERT_NEAR(found, exact[d], one_rounding(c.dtype, exact[d], size))
                << c << " token " << t << " head " << h << " element " << d;
        }
      }
  }
};

TEST_F(RotateRows, OfEveryTypeByAnglesAndTables) {
  for (DType dtype : {fp32, fp16, bf16})
    for (int rotary : {2, 22, 32, 64})
      for (bool interleaved : {false, true})
        for (std::optional<DType> tables : {std::optional<DType>{}, {fp32}, {fp16}, {bf16}}) {
          RotateCase c;
          c.dtype = dtype;
          c.rope = {.dim = rotary, .interleaved = interleaved, .base = 500.0f, .scale = 1.5f};
          c.tables = tables;
          expect_right(c);
        }
}

TEST_F(RotateRows, OfAnyHeadAtAnyAddress) {
  for (int dim : {2, 8, 20, 80, 128, 576})
    for (int gap : {0, 1, 8})
      for (int offset : {0, 1}) {
        RotateCase c;
        c.dim = dim;
        c.heads = dim == 8 ? 70 : 3;
        c.rope.dim = dim;
        c.gap = gap;
        c.offset = offset;
        expect_right(c);
      }
}

TEST_F(RotateRows, OfARanksShare) {
  for (int rank = 0; rank < 3; ++rank)
    for (const Shard& shard : {Shard::contiguous(0, rank, 3), Shard::striped(0, rank, 3),
                               Shard::interleaved(0, rank, 3, 4)}) {
      RotateCase c;
      c.queries = shard;
      expect_right(c);
    }
}

/// Rows of [batch, heads, tokens, dim], whose sequences lie apart, as the same rows in order.
TEST_F(RotateRows, OfSequencesThatLieApart) {
  for (DType dtype : {fp32, bf16}) {
    constexpr std::int64_t kBatch = 3, kTokens = 5, kHeads = 2, kDim = 16, kRow = kHeads * kDim;
    Array apart(dtype, kBatch * kTokens * kRow), in_order = apart;
    for (std::int64_t b = 0; b < kBatch; ++b)
      for (std::int64_t h = 0; h < kHeads; ++h)
        for (std::int64_t t = 0; t < kTokens; ++t)
          for (std::int64_t d = 0; d < kDim; ++d) {
            const float value = normal();
            apart.set(((b * kHeads + h) * kTokens + t) * kDim + d, value);
            in_order.set((b * kTokens + t) * kRow + h * kDim + d, value);
          }
    const auto starts = on_device<std::int32_t>({0, 5, 10, 15}),
               kv_len = on_device<std::int32_t>({9, 100, 5});
    const auto turns = on_device(turns_of({.dim = kDim}));
    kernels::RotateParams p;
    p.geometry.dtype = p.geometry.q_dtype = dtype;
    p.geometry.tokens = kBatch * kTokens;
    p.geometry.heads = kHeads;
    p.geometry.head_dim = kDim;
    p.geometry.batch = {kBatch, starts.data(), kv_len.data()};
    p.rope.dim = kDim;
    p.rope.turns = turns.data();
    const auto rotated = [&](const Array& rows, std::int64_t row, std::int64_t head,
                             kernels::SequenceGap gap) {
      const auto from = on_device(rows.bytes), to = poisoned<std::byte>(rows.bytes.size());
      p.from = {from.data(), row, head, gap};
      p.to = {to.data(), kRow, kDim};
      backend().rotate_rows(p, {});
      return to.values();
    };
    EXPECT_EQ(rotated(apart, kDim, kTokens * kDim, {(kHeads - 1) * kTokens * kDim, kTokens}),
              rotated(in_order, kRow, kDim, {}));
  }
}

/// The angles of positions up to 2^31 keep the digits of fp32.
TEST_F(RotateRows, AtFarPositions) {
  for (bool interleaved : {false, true}) {
    RotateCase c;
    c.dtype = fp32;
    c.dim = 128;
    c.rope = {.dim = 128, .interleaved = interleaved};
    c.query_len = {5, 5, 5};
    c.kv_len = {1000003, 16777219, 2147483647};
    expect_right(c);
  }
}

/// A position past the end of the tables gives NaN, and reads nothing.
TEST_F(RotateRows, PastTheTablesAreNaN) {
  const std::vector<float> ones(8, 1.0f), row(8, 1.0f);
  const auto table = on_device(ones), from = on_device(row);
  const auto to = poisoned<float>(8);
  kernels::RotateParams p;
  p.geometry.tokens = 1;
  p.geometry.head_dim = 8;
  p.geometry.shard.length = 3;
  p.from = kernels::Rows{from.data(), 8, 8};
  p.to = {to.data(), 8, 8};
  p.rope.dim = 8;
  p.rope.cos = p.rope.sin = {{table.data(), fp32}, 4};
  p.rope.positions = 2;
  backend().rotate_rows(p, {});
  for (float value : to.values()) EXPECT_TRUE(std::isnan(value));
  p.rope.positions = 3;
  p.geometry.shard.length = 2;
  backend().rotate_rows(p, {});
  EXPECT_EQ(to.values(), (std::vector<float>{0, 0, 0, 0, 2, 2, 2, 2}));
}

}  // namespace longspan::tests
