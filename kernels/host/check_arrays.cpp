// Checks the arrays of a request on the host. The report keeps the first fault.
#include "kernels/faults.hpp"
#include "kernels/host/host.hpp"

namespace longspan::kernels::host {

void check_arrays(const CheckParams& p) {
  const auto report = [&](Fault fault, std::int64_t where, std::int64_t column,
                          std::int64_t value) {
    if (p.report->fault == Fault::none)
      *p.report = {fault, static_cast<std::int32_t>(where), column, value};
  };
  const auto claim = [&](std::int64_t slot) {
    std::uint32_t& word = p.claimed[slot / 32];
    const std::uint32_t bit = 1u << slot % 32;
    const bool taken = (word & bit) != 0;
    word |= bit;
    return taken;
  };
  const Geometry& geometry = p.geometry;
  for (int b = 0; b < geometry.batch.size; ++b) check_sequence(p, b, {}, report, claim);
  check_all_sequences(p, report);
  if (p.is_append && p.slots != nullptr)
    for (std::int64_t token = 0; token < geometry.tokens; ++token)
      check_slot(p, token, p.slots[token], report, claim);
}

}  // namespace longspan::kernels::host
