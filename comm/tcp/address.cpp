#include "comm/tcp/address.hpp"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <memory>
#include <mutex>

#include "comm/control/hosts.hpp"
#include "comm/control/threads.hpp"
#include "longspan/error.hpp"

namespace longspan::comm {
namespace {

constexpr int kBacklog = 1024;

/// A socket that listens there; none with the reason in `error`.
Fd try_listen(const Address& address, bool both_families, int& error) {
  Fd fd(::socket(address.family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int on = 1, only_6 = both_families ? 0 : 1;
  setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (address.family == AF_INET6)
    setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &only_6, sizeof only_6);
  if (fd && ::bind(fd.get(), address.get(), address.length) == 0 &&
      ::listen(fd.get(), kBacklog) == 0)
    return fd;
  error = errno;
  return Fd();
}

/// This machine does not have that address, or not that family of them.
bool is_elsewhere(int error) { return error == EADDRNOTAVAIL || error == EAFNOSUPPORT; }

[[noreturn]] void refuse(const std::string& where, int port, int error) {
  throw UsageError(
      fmt::format("Rank 0 could not listen on port {} of {} ({}): set LONGSPAN_PORT to a free one, "
                  "the same on all ranks.",
                  port, where, std::strerror(error)));
}

/// All addresses of the machine, or only its loopback.
Address own(int family, int port, bool loopback) {
  Address address{family, 0, {}};
  if (family == AF_INET6) {
    auto& in6 = reinterpret_cast<sockaddr_in6&>(address.storage);
    in6.sin6_family = AF_INET6;
    in6.sin6_addr = loopback ? in6addr_loopback : in6addr_any;
    in6.sin6_port = htons(static_cast<std::uint16_t>(port));
    address.length = sizeof in6;
  } else {
    auto& in = reinterpret_cast<sockaddr_in&>(address.storage);
    in.sin_family = AF_INET;
    in.sin_addr.s_addr = htonl(loopback ? INADDR_LOOPBACK : INADDR_ANY);
    in.sin_port = htons(static_cast<std::uint16_t>(port));
    address.length = sizeof in;
  }
  return address;
}

/// One socket for IPv6 and IPv4 alike, or for IPv4 where there is no other.
std::vector<Fd> listen_everywhere(int port) {
  std::vector<Fd> sockets;
  int error = 0;
  for (const int family : {AF_INET6, AF_INET}) {
    Fd fd = try_listen(own(family, port, false), true, error);
    if (!fd) continue;
    sockets.push_back(std::move(fd));
    return sockets;
  }
  refuse("all addresses", port, error);
}

/// The addresses of `host`, or nothing, with the resolver's message in `why`.
std::vector<Address> resolve(const std::string& host, int port, int flags, std::string& why) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  const int status = host.empty()
                         ? EAI_NONAME
                         : getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (status != 0) {
    why = status == EAI_SYSTEM ? std::strerror(errno) : gai_strerror(status);
    return {};
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> all(found, freeaddrinfo);
  std::vector<Address> addresses;
  for (const addrinfo* one = all.get(); one; one = one->ai_next) {
    Address address{one->ai_family, one->ai_addrlen, {}};
    std::memcpy(&address.storage, one->ai_addr, one->ai_addrlen);
    const bool known = std::any_of(addresses.begin(), addresses.end(), [&](const Address& other) {
      return std::memcmp(&other.storage, &address.storage, sizeof address.storage) == 0;
    });
    if (!known) addresses.push_back(address);  // /etc/hosts may list it twice
  }
  return addresses;
}

/// A name with the same address on every machine, loopback or not.
bool same_everywhere(const std::string& host) {
  return host == "localhost" || !numeric(host, 0).empty();
}

int port_of(const Fd& listener) {
  sockaddr_storage here{};
  socklen_t length = sizeof here;
  ::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&here), &length);
  return ntohs(here.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(here).sin6_port
                                          : reinterpret_cast<sockaddr_in&>(here).sin_port);
}

/// The addresses of this machine's interfaces that are valid elsewhere, IPv4 first. A link-local
/// IPv6 address means nothing without an interface of the rank that uses it.
std::vector<std::string> interface_addresses() {
  ifaddrs* found = nullptr;
  if (getifaddrs(&found) != 0) return {};
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> all(found, freeifaddrs);
  std::vector<std::string> hosts;
  for (const int family : {AF_INET, AF_INET6})
    for (const ifaddrs* one = all.get(); one; one = one->ifa_next) {
      if (!one->ifa_addr || one->ifa_addr->sa_family != family) continue;
      if (!(one->ifa_flags & IFF_UP) || (one->ifa_flags & IFF_LOOPBACK)) continue;
      char text[INET6_ADDRSTRLEN] = "";
      const void* bytes = nullptr;
      if (family == AF_INET) {
        bytes = &reinterpret_cast<const sockaddr_in*>(one->ifa_addr)->sin_addr;
      } else {
        const auto& in6 = reinterpret_cast<const sockaddr_in6*>(one->ifa_addr)->sin6_addr;
        if (IN6_IS_ADDR_LINKLOCAL(&in6)) continue;
        bytes = &in6;
      }
      if (inet_ntop(family, bytes, text, sizeof text)) hosts.emplace_back(text);
    }
  return hosts;
}

}  // namespace

std::string network_place() {
  char space[64] = "";
  if (::readlink("/proc/self/ns/net", space, sizeof space - 1) < 0) space[0] = '\0';
  return this_host() + " " + space;
}

Door open_door(bool within) {
  int error = 0;
  for (const int family :
       within ? std::vector<int>{AF_INET, AF_INET6} : std::vector<int>{AF_INET6, AF_INET}) {
    Door door{try_listen(own(family, 0, within), true, error)};
    if (!door.listener) continue;
    door.port = port_of(door.listener);
    if (!within) door.hosts = interface_addresses();
    if (door.hosts.empty()) door.hosts = {within && family == AF_INET6 ? "::1" : "127.0.0.1"};
    return door;
  }
  throw BackendError(
      fmt::format("No TCP socket can listen on this machine, for other ranks to connect to ({}): "
                  "check its network and its limit on open files (ulimit -n).",
                  std::strerror(error)));
}

Address local_address(const std::string& name) {
  Address address{AF_UNIX, 0, {}};
  auto& in = reinterpret_cast<sockaddr_un&>(address.storage);
  in.sun_family = AF_UNIX;
  // The first byte is 0, which makes it a name and not a file.
  const std::size_t bytes = std::min(name.size(), sizeof in.sun_path - 1);
  std::memcpy(in.sun_path + 1, name.data(), bytes);
  address.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + bytes);
  return address;
}

Door open_local_door(const std::string& name) {
  const Address here = local_address(name);
  Door door{Fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)), 0, {name}};
  if (!door.listener || ::bind(door.listener.get(), here.get(), here.length) != 0 ||
      ::listen(door.listener.get(), kBacklog) != 0)
    throw BackendError(
        fmt::format("No Unix socket can listen on this machine, for other ranks to connect to "
                    "({}): check its limit on open files (ulimit -n).",
                    std::strerror(errno)));
  return door;
}

bool Address::loopback() const {
  if (family == AF_INET) {
    const auto& in = reinterpret_cast<const sockaddr_in&>(storage);
    return ntohl(in.sin_addr.s_addr) >> 24 == 127;
  }
  return family == AF_INET6 &&
         IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6&>(storage).sin6_addr);
}

std::vector<Address> numeric(const std::string& host, int port) {
  std::string why;
  return resolve(host, port, AI_NUMERICHOST | AI_NUMERICSERV, why);
}

struct Lookup::Shared {
  std::mutex mutex;
  bool done = false;
  std::vector<Address> found;
  std::string why;
};

Lookup::Lookup(const std::string& host, int port) : shared_(std::make_shared<Shared>()) {
  shared_->found = numeric(host, port);
  shared_->done = !shared_->found.empty();
  if (shared_->done) return;
  const auto ask = [shared = shared_, host, port] {
    std::string why;
    std::vector<Address> found;
    try {
      found = resolve(host, port, 0, why);
    } catch (const std::exception&) {  // without memory for the answer there is none
    }
    const std::lock_guard lock(shared->mutex);
    shared->found.swap(found);
    shared->why.swap(why);
    shared->done = true;
  };
  start_thread("the look-up of a name", ask).detach();
}

bool Lookup::done() const {
  const std::lock_guard lock(shared_->mutex);
  return shared_->done;
}

std::vector<Address> Lookup::take(std::string& why) {
  const std::lock_guard lock(shared_->mutex);
  if (shared_->found.empty()) why = shared_->why;
  return std::move(shared_->found);
}

std::vector<Fd> listen_at(const std::string& host, int port, const std::function<bool()>& wait) {
  std::string why = "no name server has answered within the deadline";
  std::vector<Address> addresses;
  Lookup lookup(host, port);
  while (!lookup.done() && wait()) continue;
  if (lookup.done()) addresses = lookup.take(why);
  if (addresses.empty())
    throw UsageError(
        fmt::format("Rank 0 was to listen at '{}', which cannot be resolved on this machine ({}): "
                    "set MASTER_ADDR to the name or the address of rank 0's machine.",
                    host, why));
  const bool own_loopback =
      !same_everywhere(host) && std::any_of(addresses.begin(), addresses.end(),
                                            [](const Address& a) { return a.loopback(); });
  if (own_loopback) return listen_everywhere(port);

  std::vector<Fd> sockets;
  for (const Address& address : addresses) {
    int error = 0;
    if (Fd fd = try_listen(address, false, error))
      sockets.push_back(std::move(fd));
    else if (!is_elsewhere(error))
      refuse(host, port, error);
  }
  return sockets.empty() ? listen_everywhere(port) : std::move(sockets);
}

}  // namespace longspan::comm
