#include "comm/control/hosts.hpp"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <set>

namespace longspan::comm {
namespace {

std::string count(int n, const char* noun) {
  return std::to_string(n) + " " + noun + (n == 1 ? "" : "s");
}

}  // namespace

int even_nodes(const std::vector<std::string>& hosts) {
  const auto per_node = std::count(hosts.begin(), hosts.end(), hosts.front());
  std::set<std::string> seen;
  for (auto node = hosts.begin(); node != hosts.end(); node += per_node) {
    if (hosts.end() - node < per_node || !seen.insert(*node).second ||
        std::count(node, node + per_node, *node) != per_node)
      return 0;
  }
  return static_cast<int>(per_node);
}

std::string this_host() {
  char name[256] = "";
  gethostname(name, sizeof name - 1);
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return std::string(name) + " " + boot;
}

Place find_place(Control& control) {
  const auto hosts = control.gather(this_host(), "find the machines");
  const std::string& mine = hosts[control.rank()];
  const auto here = hosts.begin() + control.rank();
  return {static_cast<int>(std::set<std::string>(hosts.begin(), hosts.end()).size()),
          static_cast<int>(std::count(hosts.begin(), here, mine)),
          static_cast<int>(std::count(hosts.begin(), hosts.end(), mine)), even_nodes(hosts)};
}

std::string describe(int ranks, const Place& place) {
  return count(ranks, "rank") + ", " + count(place.nodes, "node");
}

}  // namespace longspan::comm
