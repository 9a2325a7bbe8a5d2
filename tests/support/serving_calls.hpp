// A valid call of each kind of class ServingOps, on the host, and the checks of its refusals.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "longspan/buffer.hpp"
#include "longspan/error.hpp"
#include "longspan/serving.hpp"
#include "tests/support/random_elements.hpp"

namespace longspan {

using ::testing::HasSubstr;

constexpr int kHeads = 4, kKvHeads = 2, kDim = 32, kPage = 16, kPages = 9, kColumns = 4;
constexpr int kTokens = 4, kBatch = 2, kSegments = 3, kPadded = 40;

using tests::random_floats;

inline std::vector<float> nans(std::size_t n) { return std::vector<float>(n, NAN); }

/// Two sequences of 1 and 3 new tokens, 20 and 33 keys in all; unneeded values are NaN or -1.
struct ServingCalls {
  ServingOps kernels{Device::host, 2};
  std::vector<float> q = random_floats(kTokens * kHeads * kDim, 1);
  std::vector<float> k_cache = random_floats(kPages * kPage * kKvHeads * kDim, 2);
  std::vector<float> v_cache = random_floats(kPages * kPage * kKvHeads * kDim, 3);
  std::vector<float> new_k = random_floats(kTokens * kKvHeads * kDim, 4);
  std::vector<float> new_v = random_floats(kTokens * kKvHeads * kDim, 5);
  std::vector<float> out = nans(kTokens * kHeads * kDim), lse = nans(kTokens * kHeads);
  std::vector<float> seg_output = nans(kTokens * kHeads * kSegments * kPadded);
  std::vector<float> seg_max = nans(kTokens * kHeads * kSegments), seg_expsum = seg_max;
  std::vector<std::int32_t> table{7, 2, -1, -1, 0, 5, 3, -1};
  std::vector<std::int32_t> query_start{0, 1, 4}, kv_len{20, 33};
  std::vector<std::int64_t> slots{7 * 16 + 19 - 16, 3, 40, -1};
  std::vector<float> one{1.0f}, kv_scales = std::vector<float>(3, 1.0f),
                                sinks = random_floats(kHeads, 6);
  std::vector<float> qq = std::vector<float>(9, 0.0f);
  Buffer workspace;

  Tensor rows(std::vector<float>& data, std::int64_t heads) {
    return Tensor(data.data(), fp32, {kTokens, heads, kDim});
  }
  Tensor pages(std::vector<float>& data) {
    return Tensor(data.data(), fp32, {kPages, kPage, kKvHeads, kDim});
  }
  Segments segments() {
    return {Tensor(seg_output.data(), fp32, {kTokens, kHeads, kSegments, kPadded}),
            Tensor(seg_max.data(), fp32, {kTokens, kHeads, kSegments}),
            Tensor(seg_expsum.data(), fp32, {kTokens, kHeads, kSegments})};
  }

  template <class Args>
  Args common() {
    Args a;
    a.attention.q = rows(q, kHeads);
    a.attention.k_cache = pages(k_cache);
    a.attention.v_cache = pages(v_cache);
    a.attention.block_table = Tensor(table.data(), {kBatch, kColumns});
    a.attention.query_start = Tensor(query_start.data(), {kBatch + 1});
    a.attention.kv_len = Tensor(kv_len.data(), {kBatch});
    a.attention.out = rows(out, kHeads);
    a.attention.lse = Lse::tokens_heads(Tensor(lse.data(), fp32, {kTokens, kHeads}));
    return a;
  }
  template <class Args>
  Args with_workspace(Args a) {
    workspace = Buffer(Device::host, kernels.workspace_bytes(a));
    std::memset(workspace.data(), 0xff, workspace.bytes());
    a.attention.workspace = {workspace.data(), workspace.bytes()};
    return a;
  }
  SegmentedAttention segmented() { return with_workspace(common<SegmentedAttention>()); }
  SegmentedAttention handed_out() {
    auto a = common<SegmentedAttention>();
    a.segments = segments();
    return with_workspace(a);
  }
  ContextAttention context() {
    auto a = common<ContextAttention>();
    a.k = rows(new_k, kKvHeads);
    a.v = rows(new_v, kKvHeads);
    return with_workspace(a);
  }
  AppendKv append() {
    return {.k = rows(new_k, kKvHeads),
            .v = rows(new_v, kKvHeads),
            .k_cache = pages(k_cache),
            .v_cache = pages(v_cache),
            .slots = Tensor(slots.data(), {kTokens})};
  }
  ReduceSegments reduce() {
    return {.segments = segments(),
            .out = rows(out, kHeads),
            .lse = Lse::tokens_heads(Tensor(lse.data(), fp32, {kTokens, kHeads})),
            .query_start = Tensor(query_start.data(), {kBatch + 1}),
            .kv_len = Tensor(kv_len.data(), {kBatch})};
  }
};

inline bool untouched(const std::vector<float>& values) {
  for (float value : values)
    if (!std::isnan(value)) return false;
  return true;
}

/// `call` throws an E with `text` in its message, and the results of `p` are unchanged.
template <class E>
void expect_refused(const ServingCalls& p, const std::function<void()>& call,
                    const std::string& text) {
  SCOPED_TRACE(text);
  try {
    call();
    ADD_FAILURE() << "not refused";
  } catch (const E& error) {
    EXPECT_THAT(error.what(), HasSubstr(text));
  } catch (const Error& error) {
    ADD_FAILURE() << "another kind of error: " << error.what();
  }
  EXPECT_TRUE(untouched(p.out) && untouched(p.lse) && untouched(p.seg_output));
}

/// Changes to a valid call, each with a text that the refusal must contain.
template <class Args>
struct Change {
  const char* text;
  std::function<void(Args&, ServingCalls&)> apply;
};

template <class E, class Args, class Fit, class Call>
void refuse_all(const std::vector<Change<Args>>& changes, Fit fit, Call call) {
  for (const Change<Args>& change : changes) {
    ServingCalls p;
    Args a = fit(p);
    change.apply(a, p);
    expect_refused<E>(
        p, [&] { call(p.kernels, a); }, change.text);
  }
}

}  // namespace longspan
