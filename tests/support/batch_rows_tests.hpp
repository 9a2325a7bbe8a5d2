// Queries, results and lse in a model's layout, [batch, heads, tokens, dim] over any memory, on
// every device: the bits of rows at equal steps, with nothing written between them. Arrays that do
// not fit together are refused by name.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "longspan/longspan.hpp"
#include "tests/support/on_device.hpp"

namespace longspan::tests {

/// Defined by the test file: the ranks, on that device, which all run these tests.
Communicator ranks_on(Device device);

class BatchRows : public OnDevice {
 protected:
  static constexpr int kHeads = 4, kKvHeads = 2, kBatch = 3, kKeys = 260;

  void SetUp() override {
    OnDevice::SetUp();
    if (IsSkipped()) return;
    world_ = ranks_on(device());
    random_.seed(static_cast<unsigned>(
        std::stoull(world_->gather(std::to_string(fresh_seed()), "seed").front())));
  }

  /// Where (sequence, head, token) of a [kBatch, kHeads, tokens, columns] begins in its memory.
  struct Form {
    std::int64_t sequence, head, token, columns;

    /// The memory of `tokens` tokens, with room behind the last element.
    std::int64_t elements(std::int64_t tokens) const {
      return (kBatch - 1) * sequence + (kHeads - 1) * head + (tokens - 1) * token + columns + 8;
    }
  };

  // Columns are those of q or out; an lse has one.
  static Form joined(std::int64_t tokens, std::int64_t columns) {
    return {tokens * kHeads * columns, columns, kHeads * columns, columns};
  }
  static Form heads_first(std::int64_t tokens, std::int64_t columns) {
    return {kHeads * tokens * columns, tokens * columns, columns, columns};
  }
  /// Rows of all heads, and room between the sequences.
  static Form padded(std::int64_t tokens, std::int64_t columns) {
    return {(tokens + 2) * kHeads * columns, columns, kHeads * columns, columns};
  }
  using MakeForm = Form (*)(std::int64_t, std::int64_t);

  /// One tensor in a form, from values in the order [batch, tokens, heads, columns].
  class Placed {
   public:
    Placed(Device device, MakeForm make, DType dtype, std::int64_t tokens, std::int64_t columns)
        : form_(make(tokens, columns)),
          dtype_(dtype),
          tokens_(tokens),
          memory_(device, static_cast<std::size_t>(form_.elements(tokens)) * size_of(dtype)),
          device_(device) {}
    Placed(Device device, MakeForm make, DType dtype, std::int64_t tokens, std::int64_t columns,
           const std::vector<float>& values)
        : Placed(device, make, dtype, tokens, columns) {
      std::vector<std::byte> bytes = memory_.values();
      std::int64_t i = 0;
      each([&](std::int64_t at) { store_element(bytes.data(), dtype_, at, values[i++]); });
      memory_ = DeviceArray<std::byte>(device, bytes);
    }

    Tensor tensor() const {
      Tensor t(memory_.data(), dtype_, {kBatch, kHeads, tokens_, form_.columns}, device_);
      t.stride = {form_.sequence, form_.head, form_.token, 1};
      return t;
    }
    Lse lse() const {
      Tensor t(memory_.data(), dtype_, {kBatch, kHeads, tokens_}, device_);
      t.stride = {form_.sequence, form_.head, form_.token};
      return Lse::heads_tokens(t);
    }

    /// The values in their given order. The gaps between rows must still be NaN.
    std::vector<float> values() const {
      std::vector<std::byte> bytes = memory_.values();
      std::vector<float> found;
      each([&](std::int64_t at) {
        found.push_back(load_element(bytes.data(), dtype_, at));
        std::fill_n(bytes.begin() + at * static_cast<std::int64_t>(size_of(dtype_)),
                    size_of(dtype_), std::byte{0xff});
      });
      for (const std::byte byte : bytes)
        if (byte != std::byte{0xff}) {
          ADD_FAILURE() << "something was written between the rows";
          break;
        }
      return found;
    }

   private:
    template <class Use>
    void each(const Use& use) const {
      for (std::int64_t b = 0; b < kBatch; ++b)
        for (std::int64_t t = 0; t < tokens_; ++t)
          for (std::int64_t h = 0; h < kHeads; ++h)
            for (std::int64_t c = 0; c < form_.columns; ++c)
              use(b * form_.sequence + h * form_.head + t * form_.token + c);
    }

    Form form_;
    DType dtype_;
    std::int64_t tokens_;
    DeviceArray<std::byte> memory_;
    Device device_;
  };

  std::vector<float> normals(std::int64_t count) {
    std::vector<float> values(static_cast<std::size_t>(count));
    for (float& value : values) value = normal();
    return values;
  }

  /// A batch of equal query lengths over keys of different ones.
  struct Batch {
    std::int64_t tokens;
    int dim;
    DType dtype;
    std::vector<float> q;
    DeviceArray<std::byte> k, v;
    DeviceArray<std::int32_t> starts, lens;
  };
  Batch batch(std::int64_t tokens, int dim, DType dtype) {
    const auto cache = [&] {
      std::vector<std::byte> bytes(std::size_t{kBatch} * kKeys * kKvHeads * dim * size_of(dtype));
      for (std::int64_t i = 0; i < std::int64_t{kBatch} * kKeys * kKvHeads * dim; ++i)
        store_element(bytes.data(), dtype, i, normal());
      return on_device(bytes);
    };
    std::vector<std::int32_t> starts, lens;
    for (int b = 0; b <= kBatch; ++b) starts.push_back(static_cast<int>(b * tokens));
    for (int b = 0; b < kBatch; ++b) lens.push_back(kKeys - 25 * b);
    std::vector<float> q = normals(kBatch * tokens * kHeads * dim);
    return {tokens, dim, dtype, q, cache(), cache(), on_device(starts), on_device(lens)};
  }
  Tensor cache(const Batch& b, const DeviceArray<std::byte>& memory) const {
    return {memory.data(), b.dtype, {kBatch, kKeys, kKvHeads, b.dim}, device()};
  }
  AttentionArgs args(const Batch& b, const Placed& q, const Placed& out, const Placed& lse) const {
    return {.q = q.tensor(),
            .k = cache(b, b.k),
            .v = cache(b, b.v),
            .out = out.tensor(),
            .lse = lse.lse(),
            .query_start = Tensor(b.starts.data(), {kBatch + 1}, device()),
            .kv_len = Tensor(b.lens.data(), {kBatch}, device())};
  }
  Attention layer(const Batch& b) const {
    return Attention(*world_, {.heads = kHeads,
                               .kv_heads = kKvHeads,
                               .head_dim = b.dim,
                               .dtypes = {.compute = b.dtype},
                               .mask = {.causal = true},
                               .limits = {.max_tokens = kBatch * b.tokens, .max_batch = kBatch},
                               .threads = 2,
                               .debug = {.check_arrays = true}});
  }

  struct Result {
    std::vector<float> out, lse;
  };
  Result run(Attention& layer, const Batch& b, MakeForm q_form, MakeForm out_form,
             MakeForm lse_form) {
    const Placed q(device(), q_form, b.dtype, b.tokens, b.dim, b.q);
    const Placed out(device(), out_form, b.dtype, b.tokens, b.dim);
    const Placed lse(device(), lse_form, fp32, b.tokens, 1);
    layer.run(args(b, q, out, lse));
    layer.wait();
    return {out.values(), lse.values()};
  }

  /// All finite, and the same numbers; or close to them, where another kernel may have run.
  static void expect_same(const Result& expected, const Result& found, double tolerance) {
    const auto compare = [&](const std::vector<float>& a, const std::vector<float>& b) {
      ASSERT_EQ(a.size(), b.size());
      for (std::size_t i = 0; i < a.size(); ++i) {
        ASSERT_TRUE(std::isfinite(a[i]) && std::isfinite(b[i])) << i;
        if (tolerance == 0)
          ASSERT_EQ(a[i], b[i]) << i;
        else
          ASSERT_NEAR(a[i], b[i], tolerance) << i;
      }
    };
    compare(expected.out, found.out);
    compare(expected.lse, found.lse);
  }

  std::optional<Communicator> world_;
};

TEST_F(BatchRows, EveryMemoryHasTheBitsOfRowsAtEqualSteps) {
  for (const DType dtype : {fp32, bf16, fp16})
    for (const int dim : {64, 128})
      for (const std::int64_t tokens : {1, 3, 40, 150}) {
        if (is_left_out(kBatch * tokens * kHeads * dim)) continue;
        SCOPED_TRACE(std::string(name(dtype)) + " dim " + std::to_string(dim) + " tokens " +
                     std::to_string(tokens));
        const Batch b = batch(tokens, dim, dtype);
        Attention attention = layer(b);
        const Result expected = run(attention, b, joined, joined, joined);
        for (const MakeForm q : {joined, heads_first, padded})
          for (const MakeForm out : {joined, heads_first, padded}) {
            // On a GPU padded queries of 16 bits are not the Hopper kernel's.
            const bool other = q == padded && dtype != fp32 && device() == Device::cuda;
            expect_same(expected, run(attention, b, q, out, q == joined ? heads_first : padded),
                        other ? 3e-2 : 0.0);
            if (HasFatalFailure()) return;
          }
      }
}

TEST_F(BatchRows, OneCallTakesThemToo) {
  const Batch b = batch(5, 64, fp32);
  Attention attention = layer(b);
  const Result expected = run(attention, b, joined, joined, joined);
  const Placed q(device(), heads_first, fp32, b.tokens, b.dim, b.q);
  const Placed out(device(), heads_first, fp32, b.tokens, b.dim);
  const Placed lse(device(), heads_first, fp32, b.tokens, 1);
  attend(*world_, args(b, q, out, lse), {.mask = {.causal = true}, .threads = 2});
  expect_same(expected, {out.values(), lse.values()}, 0.0);
}

TEST_F(BatchRows, StatesOnOneRank) {
  const ServingOps ops(device(), 2);
  for (const DType dtype : {fp32, bf16}) {
    const Batch b = batch(7, 64, dtype);
    const std::int64_t rows = kBatch * b.tokens;
    const auto state = poisoned<std::byte>(ServingOps::state_bytes(rows, kHeads, b.dim));
    const auto run_in = [&](MakeForm form) -> Result {
      const Placed q(device(), form, dtype, b.tokens, b.dim, b.q);
      const Placed out(device(), form, dtype, b.tokens, b.dim);
      const Placed lse(device(), form, fp32, b.tokens, 1);
      AttendState call{.state = {state.data(), ServingOps::state_bytes(rows, kHeads, b.dim)},
                       .q = q.tensor(),
                       .k = cache(b, b.k),
                       .v = cache(b, b.v),
                       .query_start = Tensor(b.starts.data(), {kBatch + 1}, device()),
                       .kv_len = Tensor(b.lens.data(), {kBatch}, device())};
      const Buffer memory(device(), ops.workspace_bytes(call));
      call.workspace = {memory.data(), memory.bytes()};
      ops.check(call);
      ops.attend_state(call);
      ops.finish_state({.state = call.state, .out = out.tensor(), .lse = lse.lse()});
      return {out.values(), lse.values()};
    };
    const Result expected = run_in(joined);
    expect_same(expected, run_in(heads_first), 0.0);
    expect_same(expected, run_in(padded), 0.0);
  }
}

TEST_F(BatchRows, MergedAcrossRanks) {
  const std::int64_t tokens = 6;
  const int dim = 32;
  CrossRankMerge merge(
      *world_, {.heads = kHeads, .value_dim = dim, .dtype = bf16, .max_tokens = kBatch * tokens},
      LogBase::e);
  const std::vector<float> part = normals(kBatch * tokens * kHeads * dim);
  const std::vector<float> part_lse = normals(kBatch * tokens * kHeads);
  const auto run_in = [&](MakeForm in, MakeForm to) -> Result {
    const Placed from(device(), in, bf16, tokens, dim, part);
    const Placed from_lse(device(), in, fp32, tokens, 1, part_lse);
    const Placed out(device(), to, bf16, tokens, dim);
    const Placed lse(device(), to, fp32, tokens, 1);
    merge.run(
        {.part = from.tensor(), .part_lse = from_lse.lse(), .out = out.tensor(), .lse = lse.lse()});
    merge.wait();
    return {out.values(), lse.values()};
  };
  const Result expected = run_in(joined, joined);
  for (const MakeForm in : {joined, heads_first, padded})
    for (const MakeForm to : {joined, heads_first, padded})
      expect_same(expected, run_in(in, to), 0.0);
}

/// Also where the part itself has equal steps, which fit any.
TEST_F(BatchRows, MergesOfOtherSequencesAreRefused) {
  const std::int64_t tokens = 4;
  const int dim = 32;
  CrossRankMerge merge(
      *world_, {.heads = kHeads, .value_dim = dim, .dtype = fp32, .max_tokens = kBatch * tokens},
      LogBase::e);
  const Placed part(device(), joined, fp32, tokens, dim), out(device(), joined, fp32, tokens, dim);
  const Placed part_lse(device(), heads_first, fp32, tokens, 1);
  const Placed lse(device(), heads_first, fp32, 6, 1);
  Lse two = lse.lse();
  two.tensor.shape[0] = 2;  // 2 of 6 are as many rows as 3 of 4
  const std::string message = refusal([&] {
    merge.run({.part = part.tensor(), .part_lse = part_lse.lse(), .out = out.tensor(), .lse = two});
  });
  EXPECT_NE(message.find("sequences that lie apart, 3 of 4 tokens and 2 of 6"), std::string::npos)
      << message;
}

/// Where q's sequences have gaps between them, they are those of query_start.
TEST_F(BatchRows, OtherStartsAreRefused) {
  Batch b = batch(20, 64, bf16);
  b.starts = on_device(std::vector<std::int32_t>{0, 19, 40, 60});
  const Placed q(device(), heads_first, bf16, b.tokens, b.dim, b.q);
  const Placed out(device(), joined, bf16, b.tokens, b.dim),
      lse(device(), joined, fp32, b.tokens, 1);
  Attention attention = layer(b);
  const std::string message = refusal([&] {
    attention.run(args(b, q, out, lse));
    attention.wait();
  });
  EXPECT_NE(message.find("query_start[1] is 19: the sequences of q lie apart, 20 rows each"),
            std::string::npos)
      << message;
}

TEST_F(BatchRows, ResultsOfOtherSequencesAreRefused) {
  const Batch b = batch(4, 64, fp32);
  Attention attention = layer(b);
  const Placed q(device(), heads_first, fp32, b.tokens, b.dim, b.q);
  const Placed out(device(), joined, fp32, b.tokens, b.dim),
      lse(device(), joined, fp32, b.tokens, 1);
  const auto refused = [&](const AttentionArgs& call, const char* text) {
    const std::string message = refusal([&] { attention.run(call); });
    EXPECT_NE(message.find(text), std::string::npos) << message;
  };
  const Placed longer(device(), heads_first, fp32, 6, b.dim);
  AttentionArgs call = args(b, q, longer, lse);
  call.out.shape[0] = 2;  // 2 of 6 are as many rows as 3 of 4
  refused(call, "views of sequences that lie apart, 3 of 4 tokens and 2 of 6; they have the same");
  call = args(b, q, out, lse);
  call.q.stride[3] = 2;
  refused(call, "q has stride 2 in its last dimension; it must be 1");
  call = args(b, q, out, lse);
  call.out = q.tensor();
  call.out.stride[0] -= 1;  // sequences overlap
  refused(call, "is written, and its elements overlap");
}

}  // namespace longspan::tests
