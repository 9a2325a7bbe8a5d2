#include "src/arguments/faults.hpp"

#include <fmt/format.h>

#include <string>

#include "longspan/error.hpp"

namespace longspan {
namespace {

std::string text_of(const kernels::FaultReport& r) {
  using kernels::Fault;
  switch (r.fault) {
    case Fault::query_start:
      return fmt::format(
          "query_start[{}] is {}: it must start at 0, ascend, and end within the rows of q",
          r.where, r.value);
    case Fault::apart:
      return fmt::format(
          "query_start[{}] is {}: the sequences of q lie apart, {} rows each, so sequence {} "
          "begins "
          "with row {}",
          r.where, r.value, r.column, r.where, r.where * r.column);
    case Fault::kv_len:
      return fmt::format("kv_len[{}] is {}; lengths are not negative", r.where, r.value);
    case Fault::too_long:
      return fmt::format(
          "sequence {} has {} keys and there is room for {}: in its row of block_table, in the "
          "cache, "
          "or by max_kv_len",
          r.where, r.value, r.column);
    case Fault::page:
      return fmt::format("block_table[{}][{}] is {}, which is not a page of the cache", r.where,
                         r.column, r.value);
    case Fault::slot:
      return fmt::format("slots[{}] is {}, past the end of the cache", r.where, r.value);
    case Fault::overlap:
      return fmt::format("token {} goes to slot {}, which another token has too: slots must differ",
                         r.where, r.value);
    case Fault::query_len:
      return fmt::format("sequence {} has {} query rows; at most {} were promised (max_query_len)",
                         r.where, r.value, r.column);
    case Fault::qq_width:
      return fmt::format(
          "sequence {} has {} query rows; qq_bias is wide enough for {}: it must be as wide as the "
          "longest query",
          r.where, r.value, r.column);
    case Fault::segments:
      return fmt::format(
          "sequence {} has {} keys and its segments hold {}: give more segments, or more keys in "
          "each (0 keys: as many as it takes)",
          r.where, r.value, r.column);
    case Fault::too_many:
      return fmt::format(
          "the sequences have {} keys together; at most {} were promised (max_total_keys)", r.value,
          r.column);
    case Fault::rope:
      return fmt::format(
          "rope_cos and rope_sin have {} positions and the rows of sequence {} need {}: give "
          "longer tables, or leave them out and let rope.base make the angles",
          r.column, r.where, r.value);
    case Fault::padding:
      return fmt::format("left_padding[{}] is {}; the sequence has {} keys, so it is 0 to {}",
                         r.where, r.value, r.column, r.column);
    case Fault::used_rows:
      return fmt::format("query_len[{}] is {}; the sequence has {} query rows, so it is 0 to {}",
                         r.where, r.value, r.column, r.column);
    default:
      return fmt::format("fault {} at {}, {}, {}", static_cast<int>(r.fault), r.where, r.column,
                         r.value);
  }
}

}  // namespace

void throw_fault(const kernels::FaultReport& report) {
  if (report.fault != kernels::Fault::none) throw InputError(text_of(report));
}

FaultBox::FaultBox(Device device) : memory_(device, sizeof(kernels::FaultReport)) {
  const kernels::FaultReport none;
  memory_.upload(&none);
}

void FaultBox::read() {
  kernels::FaultReport found;
  memory_.download(&found);
  if (found.fault == kernels::Fault::none) return;
  const kernels::FaultReport none;
  memory_.upload(&none);
  throw_fault(found);
}

}  // namespace longspan
