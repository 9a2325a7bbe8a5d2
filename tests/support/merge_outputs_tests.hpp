// Laws of the merge of finished outputs, on every device. Each test has the name of a defect that
// was found in a kernel of this kind.
#pragma once

#include "tests/support/outputs_case.hpp"

namespace longspan::tests {

TEST_F(MergeOutputs, BothEmptyGivesZerosAndNotNan) {
  for (DType in : {fp32, fp16, bf16})
    for (DType out : {in, e4m3})
      for (int dim : {24, 128})
        for (LogBase base : {LogBase::e, LogBase::two}) {
          OutputsCase c{.tokens = 4, .heads = 1, .dim = dim, .in = in, .out = out, .base = base};
          const OutputsData data{
              std::vector<std::byte>(2 * c.size() * size_of(in), std::byte{0xff}),
              {-kInf, kInf, -kInf, kInf, -kInf, kInf, kInf, -kInf}};
          const OutputsResult result = merge(c, data);
          EXPECT_EQ(result.lse, std::vector<float>(4, -kInf));
          EXPECT_EQ(result.out, std::vector<std::byte>(result.out.size())) << c;  // +0, all bits
        }
}

TEST_F(MergeOutputs, AnLseOfPlusInfinityIsEmptyAndItsNanPayloadNotRead) {
  for (DType in : {fp32, bf16})
    for (int empty : {0, 1})
      for (float lse : {kInf, -kInf}) {
        OutputsCase c{.tokens = 40, .dim = 128, .in = in, .out = in};
        OutputsData data = make(c, 0);
        const std::size_t half = data.out.size() / 2;
        std::fill_n(data.lse.begin() + empty * c.rows(), c.rows(), lse);
        std::fill_n(data.out.begin() + empty * half, half, std::byte{0xff});
        const OutputsResult result = merge(c, data);
        // The other side, bit for bit, and its lse.
        const std::size_t other = (1 - empty) * half;
        EXPECT_EQ(std::memcmp(result.out.data(), data.out.data() + other, half), 0) << c;
        EXPECT_EQ(std::memcmp(result.lse.data(), data.lse.data() + (1 - empty) * c.rows(),
                              c.rows() * sizeof(float)),
                  0);
      }
}

TEST_F(MergeOutputs, AFiniteScoreOfAnySizeSurvivesAnEmptySide) {
  constexpr float kMost = std::numeric_limits<float>::max();
  for (float lse : {-90.0f, -10000.0f, -1e30f, 1e30f, 3e38f, -3e38f, kMost, -kMost}) {
    OutputsCase c{.tokens = 1, .heads = 2, .dim = 64};
    OutputsData data = make(c, 0);
    data.lse = {lse, -kInf, kInf, lse};
    const OutputsResult result = merge(c, data);
    EXPECT_EQ(result.lse, (std::vector<float>{lse, lse}));
    for (int d = 0; d < c.dim; ++d) {
      EXPECT_EQ(load_element(result.out.data(), fp32, d), load_element(data.out.data(), fp32, d));
      EXPECT_EQ(load_element(result.out.data(), fp32, c.dim + d),
                load_element(data.out.data(), fp32, c.size() + c.dim + d));
    }
  }
}

/// A natural lse of 3e38 used to become infinite in base 2, and two of -3e38 merged to NaN.
TEST_F(MergeOutputs, AFiniteScoreOfAnySizeSurvivesOtherFiniteOnes) {
  constexpr float kMost = std::numeric_limits<float>::max();
  const std::vector<float> sizes{3e38f, -3e38f, 0.0f,     kMost,  -kMost, 2.5e38f,
                                 3e38f, 1e38f,  -2.5e38f, -3e38f, 88.0f,  -1e30f};
  for (LogBase base : {LogBase::e, LogBase::two})
    for (int parts : {2, 9})
      for (DType in : {fp32, bf16})
        for (int dim : {5, 128}) {
          OutputsCase c{.tokens = 144, .heads = 1, .dim = dim, .parts = parts, .in = in, .out = in};
          c.base = base;
          OutputsData data = make(c, 0);
          for (int token = 0; token < c.tokens; ++token)
            for (int n = 0; n < parts; ++n) {  // every pair first, then any
              const std::size_t at = n == 0   ? token / sizes.size()
                                     : n == 1 ? token % sizes.size()
                                              : below(static_cast<int>(sizes.size()));
              data.lse[n * c.rows() + token] = sizes[at];
            }
          expect_right(c, data, merge(c, data));
        }
}

TEST_F(MergeOutputs, LseOfHeadsByTokensIsNotReadAsTokensByHeads) {
  for (DType in : {fp32, bf16}) {
    OutputsCase c{.tokens = 32, .heads = 32, .dim = 64, .in = in, .out = in};
    const OutputsData data = make(c);
    const OutputsResult result = merge(c, data);
    expect_right(c, data, result);
    OutputsCase turned = c;
    turned.heads_first = true;
    OutputsData turned_data = data;
    for (int n = 0; n < 2; ++n)
      for (std::int64_t token = 0; token < c.tokens; ++token)
        for (int head = 0; head < c.heads; ++head)
          turned_data.lse[n * c.rows() + turned.lse_at(token, head)] =
              data.lse[n * c.rows() + c.lse_at(token, head)];
    const OutputsResult same = merge(turned, turned_data);
    EXPECT_EQ(same.out, result.out);
    EXPECT_FALSE(merge(turned, data).out == result.out);  // the mix-up shows
    for (std::int64_t token = 0; token < c.tokens; ++token)
      for (int head = 0; head < c.heads; ++head)
        EXPECT_EQ(same.lse[turned.lse_at(token, head)], result.lse[c.lse_at(token, head)]);
  }
}

TEST_F(MergeOutputs, BaseTwoIsNotReadAsBaseE) {
  for (int parts : {2, 5}) {
    OutputsCase c{.tokens = 50, .parts = parts, .base = LogBase::two};
    const OutputsData data = make(c);
    const OutputsResult two = merge(c, data);
    expect_right(c, data, two);
    OutputsCase natural = c;
    natural.base = LogBase::e;
    EXPECT_FALSE(merge(natural, data).out == two.out);
    OutputsData same = data;
    for (float& lse : same.lse) lse *= kLn2;
    const OutputsResult e = merge(natural, same);
    expect_right(natural, same, e);
    for (std::size_t i = 0; i < e.lse.size(); ++i)
      if (e.lse[i] != -kInf) {
        EXPECT_NEAR(e.lse[i], two.lse[i] * kLn2, 1e-5);
      }
  }
}

/// A head of dim 192 takes several warps, which once raced for the lse that one of them wrote.
TEST_F(MergeOutputs, InPlaceOnEitherSideGivesTheSameBits) {
  for (DType in : {fp32, fp16, bf16})
    for (int dim : {5, 40, 64, 80, 128, 192, 256, 300})
      for (bool heads_first : {false, true})
        for (std::int64_t with_prefix : {-1, 300}) {
          OutputsCase c{.tokens = 613, .heads = 4, .dim = dim, .in = in, .out = in};
          c.heads_first = heads_first;
          c.with_prefix = with_prefix;
          if (is_left_out(2 * c.size())) continue;
          const OutputsData data = make(c);
          const OutputsResult apart = merge(c, data);
          c.in_place = true;
          for (c.place = 0; c.place < 2; ++c.place)
            EXPECT_TRUE(merge(c, data).same_bits(apart)) << c;
        }
}

TEST_F(MergeOutputs, InPlaceOnTheFirstOfManyParts) {
  for (int parts : {1, 3, 20})
    for (int dim : {5, 64, 192}) {
      OutputsCase c{.tokens = 100, .dim = dim, .parts = parts, .in = bf16, .out = bf16};
      const OutputsData data = make(c);
      const OutputsResult apart = merge(c, data);
      c.in_place = true;
      EXPECT_TRUE(merge(c, data).same_bits(apart)) << c;
    }
}

TEST_F(MergeOutputs, InPlaceOfLargeOnes) {
  for (DType in : {fp32, bf16}) {
    OutputsCase c{
        .tokens = reduced<std::int64_t>(4096, 400), .heads = 16, .dim = 128, .in = in, .out = in};
    const OutputsData data = make(c);
    const OutputsResult apart = merge(c, data);
    for (std::int64_t token = 0; token < c.tokens; token += 16)
      if (!row_is_right(c, data, apart, token, static_cast<int>(below(c.heads)))) break;
    c.in_place = true;
    EXPECT_TRUE(merge(c, data).same_bits(apart)) << c;
  }
}

TEST_F(MergeOutputs, TokensPastThePrefixCopyTheSuffixBitForBit) {
  for (DType in : {fp32, fp16, bf16})
    for (int dim : {3, 64, 128})
      for (std::int64_t with_prefix : {0, 1, 5, 9, 20}) {
        OutputsCase c{.tokens = 9, .dim = dim, .in = in, .out = in, .with_prefix = with_prefix};
        OutputsData data = make(c, 0);
        // Rows past the prefix must not be read: their lse would win.
        for (std::int64_t i = std::min(with_prefix, c.tokens) * c.heads; i < c.rows(); ++i)
          data.lse[i] = 1e6f;
        const OutputsResult result = merge(c, data);
        expect_right(c, data, result);
        const std::size_t row = static_cast<std::size_t>(c.row_stride()) * size_of(in);
        for (std::int64_t token = with_prefix; token < c.tokens; ++token) {
          EXPECT_EQ(std::memcmp(&result.out[token * row], &data.out[(c.tokens + token) * row], row),
                    0);
          for (int head = 0; head < c.heads; ++head)
            EXPECT_EQ(result.lse[c.lse_at(token, head)],
                      data.lse[c.rows() + c.lse_at(token, head)]);
        }
      }
}

/// A copy has no meaning: neither an lse that elsewhere means "no keys" nor one of NaN changes it.
TEST_F(MergeOutputs, ACopiedSuffixKeepsAnyLseAndItsRow) {
  for (DType in : {fp32, bf16})
    for (DType out : {in, in == fp32 ? bf16 : fp32, e4m3})
      for (int dim : {3, 128})
        for (bool nan_is_empty : {false, true}) {
          OutputsCase c{.tokens = 9, .dim = dim, .in = in, .out = out, .with_prefix = 4};
          c.nan_is_empty = nan_is_empty;
          if (is_fp8(out)) c.scale = 0.05f;
          OutputsData data = make(c, 0);
          const float odd[] = {kInf, -kInf, kNaN, 3e38f};
          for (std::int64_t i = 0; i < c.rows(); ++i) data.lse[c.rows() + i] = odd[i % 4];
          const OutputsResult result = merge(c, data);
          for (std::int64_t token = c.with_prefix; token < c.tokens; ++token)
            for (int head = 0; head < c.heads; ++head) {
              ASSERT_TRUE(row_is_right(c, data, result, token, head));
              ASSERT_EQ(std::bit_cast<std::uint32_t>(result.lse[c.lse_at(token, head)]),
                        std::bit_cast<std::uint32_t>(data.lse[c.rows() + c.lse_at(token, head)]));
            }
        }
}

/// A prefix without memory: reading it would be a fault.
TEST_F(MergeOutputs, APrefixOfNoTokensMayBeNull) {
  for (int dim : {60, 128}) {
    const OutputsCase c{.tokens = 9, .dim = dim};
    const OutputsData data = make(c, 0);
    const auto suffix = on_device(data.out);
    const auto lse = on_device(data.lse);
    const auto out = poisoned<float>(static_cast<std::size_t>(c.size()));
    kernels::MergeOutputsParams p;
    p.in[1] = {suffix.data(), c.row_stride(), c.head_stride()};
    p.in_lse[1] = {lse.data(), c.heads, 1};
    p.with_prefix = 0;
    p.tokens = c.tokens;
    p.heads = c.heads;
    p.dim = c.dim;
    p.out = {out.data(), c.row_stride(), c.head_stride()};
    backend().merge_outputs(p, {});
    EXPECT_EQ(std::memcmp(out.values().data(), data.out.data(), c.size() * sizeof(float)), 0);
  }
}

TEST_F(MergeOutputs, NanStaysNanUnlessItIsSaidToBeEmpty) {
  for (int parts : {2, 3})
    for (int dim : {12, 128})
      for (bool nan_is_empty : {false, true}) {
        OutputsCase c{.tokens = 20, .dim = dim, .parts = parts, .nan_is_empty = nan_is_empty};
        OutputsData data = make(c);
        for (float& lse : data.lse)
          if (below(5) == 0) lse = kNaN;
        expect_right(c, data, merge(c, data));
      }
}

TEST_F(MergeOutputs, AnyDimAnyStrideAnyType) {
  for (DType in : {fp32, fp16, bf16})
    for (int dim : {1, 2, 3, 4, 7, 8, 12, 20, 24, 40, 72, 96, 100, 112, 128, 192, 257, 512, 1000})
      for (int gap : {0, 1, 8})
        for (int offset : {0, 1}) {
          OutputsCase c{.tokens = 5, .dim = dim, .in = in, .out = in};
          c.row_gap = gap;
          c.head_gap = gap;
          c.offset = offset;
          expect_right(c);
          c.out = e4m3;
          c.scale = 0.05f;
          expect_right(c);
        }
}

/// fp32 parts into 16 bits or fp8, a prefix of one type and a suffix of another, fp8 parts.
TEST_F(MergeOutputs, PartsAndResultOfAnyType) {
  const DType all[] = {fp32, fp16, bf16, e4m3, e5m2};
  for (DType prefix : all)
    for (DType suffix : all)
      for (DType out : all)
        for (int dim : {5, 24, 128, 300}) {
          OutputsCase c{.tokens = 9, .dim = dim, .in = prefix, .out = out};
          c.suffix = suffix;
          c.part_scales = {is_fp8(prefix) ? 0.37f : 1.0f, is_fp8(suffix) ? 2.5f : 1.0f};
          if (is_fp8(out)) c.scale = 0.05f;
          c.row_gap = dim == 24 ? 8 : dim == 128 ? 1 : 0;
          c.with_prefix = dim == 300 ? 4 : -1;
          c.base = dim == 5 ? LogBase::two : LogBase::e;
          expect_right(c);
        }
}

TEST_F(MergeOutputs, ManyPartsOfAnyTypeIntoAnyType) {
  for (int parts : {1, 3, 8, 20})
    for (DType in : {fp32, bf16, e4m3, e5m2})
      for (DType out : {fp32, fp16, e4m3})
        for (int dim : {5, 64}) {
          OutputsCase c{.tokens = 6, .dim = dim, .parts = parts, .in = in, .out = out};
          for (int n = 0; is_fp8(in) && n < parts; ++n)
            c.part_scales.push_back(0.1f + static_cast<float>(n));
          if (is_fp8(out)) c.scale = 0.05f;
          expect_right(c);
        }
}

/// The type that a part travels in does not matter to the merge: widened by hand, the same bits.
TEST_F(MergeOutputs, APartOfAnotherTypeCountsAsItsValues) {
  for (DType suffix : {fp16, bf16, e4m3}) {
    OutputsCase c{.tokens = 30, .dim = 64, .suffix = suffix};
    const OutputsData data = make(c);
    OutputsCase wide = c;
    wide.suffix = fp32;
    OutputsData same{std::vector<std::byte>(wide.part_at(2), std::byte{0xff}), data.lse};
    for (int n : {0, 1})
      for (std::int64_t i = 0; i < c.size(); ++i) same.set(wide, n, i, data.value(c, n, i));
    EXPECT_TRUE(merge(c, data).same_bits(merge(wide, same))) << c;
  }
}

/// 3e38 and 3e38 have a mean, though no sum.
TEST_F(MergeOutputs, TheMergeOfFiniteValuesIsFinite) {
  const float most = std::numeric_limits<float>::max();
  for (DType in : {fp32, bf16})
    for (DType out : {fp32, bf16})
      for (int parts : {1, 2, 3, 8, 100})
        for (int dim : {5, 128}) {
          OutputsCase c{.tokens = 40, .heads = 2, .dim = dim, .parts = parts, .in = in, .out = out};
          if (is_left_out(parts * c.size())) continue;
          OutputsData data = make(c, 0);
          const float large = in == fp32 ? most : std::bit_cast<float>(0x7f7f0000u);
          for (int n = 0; n < parts; ++n)
            for (std::int64_t token = 0; token < c.tokens; ++token)
              for (int head = 0; head < c.heads; ++head) {
                if (token < 10) data.lse[n * c.rows() + c.lse_at(token, head)] = 1.5f;
                for (int d = 0; d < dim; d += 1 + static_cast<int>(below(3))) {
                  const float sign = token % 2 == 0 || below(2) == 0 ? 1.0f : -1.0f;
                  data.set(c, n, c.at(token, head) + d, sign * large);
                }
              }
          const OutputsResult result = merge(c, data);
          for (std::int64_t token = 0; token < c.tokens; ++token)
            for (int head = 0; head < c.heads; ++head) {
              const ExactOutput exact = merge_exactly(c, data, token, head);
              for (int d = 0; d < dim; ++d) {
                const float value = load_element(result.out.data(), out, c.at(token, head) + d);
                // One rounding to bf16 may carry past its largest number.
                if (out == bf16 && in == fp32 && std::isinf(value))
                  ASSERT_GT(std::abs(exact.out[d]), 0.99 * most);
                else  // false for an infinity or NaN
                  ASSERT_NEAR(value, exact.out[d], one_rounding(out, exact.out[d], exact.size[d]))
                      << c << " token " << token;
              }
            }
        }
}

/// Ranks that merge the same parts have the same result, in any layout.
TEST_F(MergeOutputs, WhereRowsLieChangesNoBit) {
  for (DType in : {fp32, fp16, bf16})
    for (DType out : {in, e4m3})
      for (int parts : {1, 2, 3, 8})
        for (int dim : {24, 64, 128}) {
          OutputsCase c{.tokens = 30, .dim = dim, .parts = parts, .in = in, .out = out};
          if (is_fp8(out)) c.scale = 0.3f;
          if (is_left_out(2 * parts * c.size())) continue;
          OutputsData data = make(c);
          if (in != fp16)  // some of whose sums leave fp32
            for (int n = 0; n < parts; ++n)
              for (int i = 0; i < 20; ++i)
                data.set(c, n, c.at(i, 1) + i, (n % 2 == 0 ? 3e38f : 2e38f));
          OutputsCase apart = c;
          apart.row_gap = 3, apart.head_gap = 1, apart.offset = 1;
          OutputsData same{std::vector<std::byte>(apart.part_at(parts), std::byte{0xff}), data.lse};
          const auto for_elements = [&](auto use) {
            for (std::int64_t token = 0; token < c.tokens; ++token)
              for (int head = 0; head < c.heads; ++head)
                for (int d = 0; d < dim; ++d) use(c.at(token, head) + d, apart.at(token, head) + d);
          };
          const std::size_t size = size_of(in), out_size = size_of(out);
          for (int n = 0; n < parts; ++n)
            for_elements([&](std::int64_t from, std::int64_t to) {
              std::memcpy(&same.out[apart.part_at(n) + to * size],
                          &data.out[c.part_at(n) + from * size], size);
            });
          const OutputsResult one = merge(c, data), other = merge(apart, same);
          EXPECT_EQ(std::memcmp(one.lse.data(), other.lse.data(), one.lse.size() * sizeof(float)),
                    0)
              << c;
          bool alike = true;
          for_elements([&](std::int64_t from, std::int64_t to) {
            alike = alike && std::memcmp(&one.out[from * out_size], &other.out[to * out_size],
                                         out_size) == 0;
          });
          EXPECT_TRUE(alike) << c;
        }
}

TEST_F(MergeOutputs, AnInfinityAmongTheValuesStaysOne) {
  for (int parts : {2, 5})
    for (int dim : {5, 128}) {
      OutputsCase c{.tokens = 4, .dim = dim, .parts = parts};
      OutputsData data = make(c, 0);
      data.set(c, 1, c.at(2, 1) + 3, kInf);
      data.set(c, 0, c.at(2, 1) + 4, -kInf);
      const OutputsResult result = merge(c, data);
      for (std::int64_t i = 0; i < c.size(); ++i) {
        const float value = load_element(result.out.data(), fp32, i);
        const float expected = i == c.at(2, 1) + 3 ? kInf : i == c.at(2, 1) + 4 ? -kInf : 0.0f;
        if (expected == 0.0f)
          ASSERT_TRUE(std::isfinite(value)) << i;
        else
          ASSERT_EQ(value, expected) << i;
      }
    }
}

TEST_F(MergeOutputs, WithoutAnLse) {
  OutputsCase c{.wants_lse = false};
  expect_right(c);
  c.dim = 5;
  expect_right(c);
}

TEST_F(MergeOutputs, AnyNumberOfParts) {
  for (int parts : {1, 2, 3, 4, 5, 7, 8, 9, 16, 33, 200})
    for (DType in : {fp32, fp16, bf16})
      for (int dim : {5, 24, 128, 256}) {
        OutputsCase c{.tokens = 3, .dim = dim, .parts = parts, .in = in, .out = in};
        if (is_left_out(2 * parts * c.size())) continue;
        c.heads_first = parts % 2 == 0;
        expect_right(c);
        c.out = e4m3;
        c.scale = 0.05f;
        expect_right(c);
      }
}

TEST_F(MergeOutputs, PartsThatAreAllEmptyGiveZeros) {
  OutputsCase c{.tokens = 10, .parts = 6};
  const OutputsData data = make(c, 10);
  const OutputsResult result = merge(c, data);
  EXPECT_EQ(result.lse, std::vector<float>(c.rows(), -kInf));
  EXPECT_EQ(result.out, std::vector<std::byte>(result.out.size()));
}

/// The bits of element.hpp, on every kind of number.
TEST_F(MergeOutputs, Fp8SaturatesAndNanStaysNan) {
  for (DType out : {e4m3, e5m2})
    for (DType in : {fp32, bf16})
      for (bool inverse : {false, true})
        for (int dim : {128, 100}) {
          OutputsCase c{.tokens = 300, .heads = 2, .dim = dim, .in = in, .out = out};
          c.scale = 0.3f;
          c.inverse = inverse;
          OutputsData data = make(c, 0);
          std::fill_n(data.lse.begin(), c.rows(), -kInf);  // only the suffix: out = value
          for (std::int64_t i = c.size(); i < 2 * c.size(); ++i) {
            std::uint32_t bits = random_();
            if (i % 4 != 0) bits = (bits & 0x807fffffu) | (113u + bits % 26u) << 23;
            store_element(data.out.data(), in, i, std::bit_cast<float>(bits));
          }
          const OutputsResult result = merge(c, data);
          for (std::int64_t i = 0; i < c.size(); ++i) {
            const float value = load_element(data.out.data(), in, c.size() + i);
            std::array<std::byte, 4> expected;
            store_element(expected.data(), out, 0, inverse ? value * 0.3f : value / 0.3f);
            if (std::isnan(value))
              ASSERT_TRUE(std::isnan(load_element(result.out.data(), out, i)));
            else
              ASSERT_EQ(static_cast<int>(result.out[i]), static_cast<int>(expected[0]))
                  << value << " " << c;
          }
        }
}

TEST_F(MergeOutputs, SplitsOfKeysMergeToTheWhole) {
  // out and lse over random subsets of 64 scores, against all of them.
  constexpr int kKeys = 64, kDim = 16;
  for (int parts : {2, 4}) {
    OutputsCase c{.tokens = 1, .heads = 1, .dim = kDim, .parts = parts};
    OutputsData data = make(c, 0);
    std::vector<double> score(kKeys), value(kKeys * kDim);
    for (double& s : score) s = 4 * normal();
    for (double& v : value) v = normal();
    const auto attend = [&](int part, int count) {
      std::vector<double> o(kDim);
      double sum = 0;
      for (int j = part; j < kKeys; j += count) {
        sum += std::exp(score[j]);
        for (int d = 0; d < kDim; ++d) o[d] += std::exp(score[j]) * value[j * kDim + d];
      }
      for (double& x : o) x /= sum;
      o.push_back(std::log(sum));
      return o;
    };
    for (int n = 0; n < parts; ++n) {
      const std::vector<double> o = attend(n, parts);
      data.lse[n] = static_cast<float>(o[kDim]);
      for (int d = 0; d < kDim; ++d)
        store_element(data.out.data(), fp32, n * kDim + d, static_cast<float>(o[d]));
    }
    const OutputsResult result = merge(c, data);
    const std::vector<double> whole = attend(0, 1);
    EXPECT_NEAR(result.lse[0], whole[kDim], 1e-5);
    for (int d = 0; d < kDim; ++d)
      EXPECT_NEAR(load_element(result.out.data(), fp32, d), whole[d], 1e-5);
  }
}

}  // namespace longspan::tests
