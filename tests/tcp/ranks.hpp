// Ranks without MPI: processes that main forks, and that exchange texts through it.
#pragma once

#include <string>
#include <vector>

namespace longspan::tests {

int own_rank();
int all_ranks();

/// Every rank's text, in rank order; the end of the job where a rank does not come.
std::vector<std::string> tell_all(const std::string& mine);

}  // namespace longspan::tests
