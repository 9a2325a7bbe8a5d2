#include "kernels/kernel_family.hpp"

#include "kernels/cuda/dispatch/families.hpp"
#include "kernels/host/families.hpp"

namespace longspan::kernels {
namespace {

template <class On>
void add_rows(Device device, std::span<const KernelFamily<On>> families,
              std::vector<FamilyRow>& rows) {
  for (const KernelFamily<On>& family : families)
    rows.push_back({device, family.words, family.ends, family.takes_arrivals != nullptr,
                    family.writes_new_keys != nullptr});
}

}  // namespace

std::vector<FamilyRow> family_rows() {
  std::vector<FamilyRow> rows;
  add_rows<host::OnHost>(Device::host, host::families(), rows);
  add_rows<cuda::OnGpu>(Device::cuda, cuda::families(), rows);
  return rows;
}

}  // namespace longspan::kernels
