// Each fault of a request's arrays, on every device: its report. What no visible key needs is not a
// fault.
#pragma once

#include <numeric>

#include "tests/support/on_device.hpp"

namespace longspan::tests {

using kernels::Fault;

class CheckArrays : public OnDevice {
 protected:
  /// A request without faults: three sequences, pages of 16.
  struct Request {
    std::vector<std::int32_t> query_start = {0, 3, 3, 8}, kv_len = {100, 16, 60};
    std::vector<std::int32_t> table;  // [3, 8]
    std::vector<std::int64_t> slots;  // of an append
    std::int64_t tokens = 8, columns = 8, pages = 40;
    std::int64_t slot_count = 640;
    bool is_append = false;
    std::int64_t most_keys = 0, rope_positions = 0;
    bool claims = true;
    kernels::AttendParams attend;  // masks, shard, bias

    Request() : table(24) { std::iota(table.begin(), table.end(), 5); }
  };

  kernels::FaultReport check(const Request& r, kernels::FaultReport before = {}) const {
    const auto query_start = on_device(r.query_start), kv_len = on_device(r.kv_len);
    const auto table = on_device(r.table);
    const auto slots = on_device(r.slots);
    const auto claimed = on_device(std::vector<std::uint32_t>(r.slot_count / 32 + 1));
    const auto report = on_device(std::vector<kernels::FaultReport>{before});
    kernels::CheckParams p;
    p.geometry = r.attend;
    p.parts = r.attend.parts;
    p.geometry.tokens = r.tokens;
    p.geometry.batch.size = static_cast<int>(r.kv_len.size());
    p.geometry.batch.query_start = query_start.data();
    p.geometry.batch.kv_len = kv_len.data();
    if (!r.table.empty()) p.pages = {table.data(), r.columns, 1, r.columns, r.pages, 16};
    p.is_append = r.is_append;
    if (!r.slots.empty()) p.slots = slots.data();
    p.slot_count = r.slot_count;
    p.most_keys = r.most_keys;
    p.rope_positions = r.rope_positions;
    if (r.claims) p.claimed = claimed.data();
    p.report = report.data();
    backend().check_arrays(p, {});
    return report.values()[0];
  }

  void expect_fault(const Request& r, Fault fault, std::int64_t where, std::int64_t column,
                    std::int64_t value) const {
    const kernels::FaultReport got = check(r);
    EXPECT_EQ(static_cast<int>(got.fault), static_cast<int>(fault));
    EXPECT_EQ(got.where, where);
    EXPECT_EQ(got.column, column);
    EXPECT_EQ(got.value, value);
  }
  void expect_none(const Request& r) const { expect_fault(r, Fault::none, 0, 0, 0); }
};

TEST_F(CheckArrays, ARequestWithoutFaults) {
  Request r;
  expect_none(r);
  r.table.clear();
  expect_none(r);
}

TEST_F(CheckArrays, QueryStart) {
  Request r;
  r.query_start = {1, 3, 3, 8};
  expect_fault(r, Fault::query_start, 0, 0, 1);
  r.query_start = {0, 3, 2, 8};
  expect_fault(r, Fault::query_start, 2, 0, 2);
  r.query_start = {0, 3, 3, 9};
  expect_fault(r, Fault::query_start, 3, 0, 9);
  r.query_start = {0, 3, 3, 7};  // a row of padding
  expect_none(r);
  r.query_start = {0, -5, 3, 8};
  EXPECT_EQ(check(r).fault, Fault::query_start);
}

TEST_F(CheckArrays, KvLen) {
  Request r;
  r.kv_len[1] = -1;
  expect_fault(r, Fault::kv_len, 1, 0, -1);
  r.kv_len[1] = 0;
  expect_none(r);
}

TEST_F(CheckArrays, MoreKeysThanTheTableHolds) {
  Request r;
  r.kv_len[0] = 128;
  expect_none(r);
  r.kv_len[0] = 129;
  expect_fault(r, Fault::too_long, 0, 128, 129);
  r.attend.shard = Shard::striped(0, 1, 2);  // 64 on this rank
  expect_none(r);
}

TEST_F(CheckArrays, MoreQueriesThanWerePromised) {
  Request r;
  r.query_start = {0, 3, 3, 8};
  r.attend.max_query_len = 5;
  expect_none(r);
  r.attend.max_query_len = 4;
  expect_fault(r, Fault::query_len, 2, 4, 5);
}

TEST_F(CheckArrays, MoreKeysThanTheMemoryHoldsOrWerePromised) {
  Request r;
  r.attend.max_kv_len = 100;
  expect_none(r);
  r.attend.max_kv_len = 99;
  expect_fault(r, Fault::too_long, 0, 99, 100);
  r.attend.max_kv_len = 0;
  r.table.clear();  // one after the other
  r.slot_count = 100;
  expect_none(r);
  r.slot_count = 99;
  expect_fault(r, Fault::too_long, 0, 99, 100);
}

/// A rank with rows 25 to 74 of 100: the keys that they see decide which pages it needs, and all
/// rows decide how wide a bias must be.
TEST_F(CheckArrays, AShareOfTheRows) {
  Request r;
  r.tokens = 50;
  r.query_start = {0, 50};
  r.kv_len = {100};
  r.attend.queries = Shard::zigzag(100, 1, 2);
  r.attend.mask = {.causal = true, .window = 5};
  expect_none(r);
  for (const int column : {0, 5, 6, 7}) r.table[column] = -1;  // of keys below 16, and from 80 on
  expect_none(r);
  r.table[4] = -1;
  expect_fault(r, Fault::page, 0, 4, -1);
  r.table[4] = 1;
  r.table[1] = 99;
  expect_fault(r, Fault::page, 0, 1, 99);
  r.table[1] = 1;
  const auto values = on_device(std::vector<float>(1));
  r.attend.bias.qq = {values.data(), 99, 99};
  expect_fault(r, Fault::qq_width, 0, 99, 100);
  r.attend.bias.qq.width = 100;
  expect_none(r);
}

TEST_F(CheckArrays, ACacheWithoutRows) {
  Request r;
  r.table.clear();
  r.slot_count = 0;
  r.kv_len = {100, 0, 0};  // of several faults, any one is reported
  expect_fault(r, Fault::too_long, 0, 0, 100);
  r.is_append = true;
  r.slots = {-1, -1, -1, 0, -1, -1, -1, -1};
  expect_fault(r, Fault::slot, 3, 0, 0);
}

TEST_F(CheckArrays, MoreKeysTogetherThanWerePromised) {
  Request r;
  r.most_keys = 176;
  expect_none(r);
  r.most_keys = 175;
  expect_fault(r, Fault::too_many, 0, 175, 176);
}

/// The tables have every position of the rows, also those before 0 of more queries than keys.
TEST_F(CheckArrays, TablesOfRopeThatAreTooShort) {
  Request r;
  r.rope_positions = 100;
  expect_none(r);
  r.rope_positions = 99;
  expect_fault(r, Fault::rope, 0, 99, 100);
  r.kv_len = {1, 1000, 0};  // sequence 1 has no rows; the first row of sequence 2 is at -5
  r.rope_positions = 6;
  r.table.clear();
  r.slot_count = 2000;
  expect_none(r);
  r.rope_positions = 5;
  expect_fault(r, Fault::rope, 2, 5, 6);
}

TEST_F(CheckArrays, SegmentsThatDoNotHoldASequence) {
  Request r;
  r.attend.parts = {2, 50, 16};
  expect_none(r);
  r.attend.parts.keys = 49;
  expect_fault(r, Fault::segments, 0, 98, 100);
  r.kv_len = {98, 16, 99};
  expect_fault(r, Fault::segments, 2, 98, 99);
  r.attend.parts = {1, 0, 16};  // as many tiles as it takes
  expect_none(r);
  r.attend.parts = {1, 0x7fffffff, 16};
  expect_none(r);
}

TEST_F(CheckArrays, APageThatIsNone) {
  for (std::int32_t page : {-1, 40, 1 << 30}) {
    Request r;
    r.table[2 * 8 + 3] = page;  // keys 48 to 63 of sequence 2, which has 60
    expect_fault(r, Fault::page, 2, 3, page);
  }
  Request r;
  r.table[5] = 39;
  expect_none(r);
}

TEST_F(CheckArrays, PagesThatNoRowSeesMayBeAnything) {
  Request r;
  std::fill_n(r.table.begin() + 8, 8, -1);  // sequence 1 has no rows
  r.table[7] = -1;                          // past the 100 keys of sequence 0
  expect_none(r);

  r.attend.mask = {.causal = true, .window = 20};
  std::fill_n(r.table.begin(), 4, -1);  // rows 97 to 99 see keys from 78 on: page 4
  expect_none(r);
  r.table[4] = -1;
  expect_fault(r, Fault::page, 0, 4, -1);
}

TEST_F(CheckArrays, AQueryLongerThanItsSequence) {
  Request r;
  r.kv_len = {2, 0, 4};  // rows below position 0 see nothing
  std::fill(r.table.begin(), r.table.end(), -1);
  r.table[0] = r.table[2 * 8] = 0;
  r.attend.mask = {.causal = true, .window = 3};
  expect_none(r);
  r.table[2 * 8] = -2;
  expect_fault(r, Fault::page, 2, 0, -2);
}

TEST_F(CheckArrays, DocumentsBoundWhatIsSeen) {
  Request r;
  r.query_start = {0, 3};
  r.kv_len = {100};
  r.tokens = 3;
  const auto starts = on_device(std::vector<std::int64_t>{0, 50, 90, 100});
  r.attend.documents = {starts.data(), 3};
  std::fill_n(r.table.begin(), 5, -1);  // rows 97 to 99 are of the document from 90: page 5
  expect_none(r);
  r.table[5] = 40;
  expect_fault(r, Fault::page, 0, 5, 40);
}

TEST_F(CheckArrays, DocumentsOfEachSequence) {
  Request r;
  r.query_start = {0, 3, 3, 8};
  const auto starts = on_device(std::vector<std::int64_t>{0, 50, 100, 0, 0, 0, 0, 40, 60});
  r.attend.documents = {starts.data(), 2, 3};
  r.table[0] = r.table[2] = r.table[2 * 8] = r.table[2 * 8 + 1] = -1;  // of earlier documents
  expect_none(r);
  r.table[2 * 8 + 2] = -2;
  expect_fault(r, Fault::page, 2, 2, -2);
}

TEST_F(CheckArrays, Padding) {
  Request r;
  const auto padding = on_device(std::vector<std::int32_t>{0, 17, 60});
  r.attend.batch.left_padding = padding.data();
  expect_fault(r, Fault::padding, 1, 16, 17);
  const auto right = on_device(std::vector<std::int32_t>{33, 16, 60});
  r.attend.batch.left_padding = right.data();
  r.table[0] = r.table[1] = r.table[2 * 8] = -1;
  expect_none(r);
  r.table[2] = -1;
  expect_fault(r, Fault::page, 0, 2, -1);
}

TEST_F(CheckArrays, UsedRows) {
  Request r;
  const auto used = on_device(std::vector<std::int32_t>{3, 0, 6});
  r.attend.batch.used_rows = used.data();
  expect_fault(r, Fault::used_rows, 2, 5, 6);
  const auto none = on_device(std::vector<std::int32_t>{3, 0, 0});
  r.attend.batch.used_rows = none.data();
  std::fill_n(r.table.begin() + 2 * 8, 8, -1);
  expect_none(r);
}

TEST_F(CheckArrays, SkippedSequencesAreNotLookedAt) {
  Request r;
  r.query_start = {0, 1, 3, 8};
  r.attend.batch.skip_decode = true;
  r.table[0] = -1;
  expect_none(r);
  r.attend.batch.skip_decode = false;
  expect_fault(r, Fault::page, 0, 0, -1);
}

TEST_F(CheckArrays, ListedKeysAreAllLookedAt) {
  Request r;
  r.query_start = {0, 3};
  r.kv_len = {100};
  r.tokens = 3;
  std::vector<std::int64_t> positions(33);
  std::iota(positions.rbegin(), positions.rend(), 60);
  const auto table = on_device(positions);
  r.attend.shard = Shard::at_positions(100, 0, 1, table.data(), 33);
  r.attend.mask = {.causal = true, .window = 1};
  r.table[3] = -1;
  expect_none(r);
  r.table[2] = -1;
  expect_fault(r, Fault::page, 0, 2, -1);
}

TEST_F(CheckArrays, AShardLooksAtItsOwnPages) {
  Request r;
  r.attend.shard = Shard::interleaved(0, 1, 2, 16);  // rank 1 has 48 of 100 keys, 0, 28 of 60
  r.table[3] = -1;
  expect_none(r);
  r.table[2] = -1;
  expect_fault(r, Fault::page, 0, 2, -1);
}

TEST_F(CheckArrays, AQueryWiderThanTheQqBias) {
  Request r;
  const auto values = on_device(std::vector<float>(25));
  r.attend.bias.qq = {Floats(values.data()), 5, 5};
  expect_none(r);
  r.attend.bias.qq.width = 4;
  expect_fault(r, Fault::qq_width, 2, 4, 5);
}

TEST_F(CheckArrays, SlotsPastTheCacheAndTwice) {
  Request r;
  r.is_append = true;
  r.slots = {0, 639, -1, 5, -1, 7, 31, 32};
  expect_none(r);
  r.slots[4] = 640;
  expect_fault(r, Fault::slot, 4, 0, 640);
  r.slots[4] = 31;
  const kernels::FaultReport got = check(r);
  EXPECT_EQ(got.fault, Fault::overlap);
  EXPECT_TRUE(got.where == 4 || got.where == 6);
  EXPECT_EQ(got.value, 31);
  r.claims = false;  // not asked for
  expect_none(r);
}

TEST_F(CheckArrays, NewRowsNeedTheirPagesAndNoOthers) {
  Request r;
  r.is_append = true;
  r.kv_len = {99, 16, 66};  // rows 96 to 98, none, 61 to 65
  std::fill(r.table.begin(), r.table.end(), -1);
  r.table[6] = 1;
  r.table[2 * 8 + 3] = 2;
  r.table[2 * 8 + 4] = 3;
  expect_none(r);
  r.table[2 * 8 + 4] = 40;
  expect_fault(r, Fault::page, 2, 4, 40);
  r.attend.shard = Shard::interleaved(0, 0, 2, 16);  // 64 and 65 are the third block of rank 0
  EXPECT_EQ(check(r).fault, Fault::page);
  r.attend.shard.rank = 1;  // and rank 1 owns only 61 to 63, its page 1
  r.table[2 * 8 + 1] = 4;
  expect_none(r);
}

TEST_F(CheckArrays, TwoSequencesOnOnePageOverlap) {
  Request r;
  r.is_append = true;
  r.kv_len = {99, 16, 66};  // row 0 and 1 of a page, in both
  r.table[6] = r.table[2 * 8 + 4] = 9;
  const kernels::FaultReport got = check(r);
  EXPECT_EQ(got.fault, Fault::overlap);
  EXPECT_TRUE(got.value == 9 * 16 || got.value == 9 * 16 + 1) << got.value;
}

TEST_F(CheckArrays, TheFirstFaultIsKept) {
  Request r;
  r.kv_len[1] = -3;
  const kernels::FaultReport before{Fault::slot, 7, 8, 9};
  const kernels::FaultReport got = check(r, before);
  EXPECT_EQ(got.fault, Fault::slot);
  EXPECT_EQ(got.where, 7);
  EXPECT_EQ(got.column, 8);
  EXPECT_EQ(got.value, 9);
}

/// Many threads find a fault at once: the report is one fault, not parts of several.
TEST_F(CheckArrays, AReportOfManyFaultsIsOneOfThem) {
  constexpr int kBatch = 700, kColumns = 300;
  for (int round = 0; round < 10; ++round) {
    Request r;
    r.query_start.resize(kBatch + 1);
    std::iota(r.query_start.begin(), r.query_start.end(), 0);
    r.tokens = kBatch;
    r.kv_len.assign(kBatch, kColumns * 16);
    r.columns = kColumns;
    r.table.resize(kBatch * kColumns);
    for (int i = 0; i < kBatch * kColumns; ++i) r.table[i] = -1 - i;
    const kernels::FaultReport got = check(r);
    EXPECT_EQ(got.fault, Fault::page);
    EXPECT_EQ(got.value, -1 - (got.where * kColumns + got.column));
  }
}

}  // namespace longspan::tests
