// Where rank 0 listens and the others connect: the addresses of a name.
//
// Rank 0 listens only on those addresses of the name that are this machine's. It listens on all of
// the machine's where the name does not tell which one the others see: when none of its addresses
// is this machine's (a forwarded port, a container), or when a machine's name means its own
// loopback, as Debian writes it into /etc/hosts.
#pragma once

#include <sys/socket.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/tcp/frames.hpp"

namespace longspan::comm {

struct Address {
  int family = 0;
  socklen_t length = 0;
  sockaddr_storage storage{};

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  bool loopback() const;
};

/// The address that is written in digits, without a look-up; nothing for any other name.
std::vector<Address> numeric(const std::string& host, int port);

/// A look-up of a name. A name server may take minutes to answer, or never do: a thread asks it,
/// and is detached where nobody waits any more.
class Lookup {
 public:
  /// Throws BackendError where no thread can be started.
  Lookup(const std::string& host, int port);
  bool done() const;
  /// Once it is done: the addresses, or nothing, with the resolver's message in `why`.
  std::vector<Address> take(std::string& why);

 private:
  struct Shared;
  std::shared_ptr<Shared> shared_;
};

/// Sockets that listen. `wait` sleeps a little, and returns whether there is more time for the name
/// server. Throws UsageError for a name without addresses and for a port that is taken.
std::vector<Fd> listen_at(const std::string& host, int port, const std::function<bool()>& wait);

/// Identifies a place within which a loopback reaches: the machine, and the network namespace on it
/// (containers have their own).
std::string network_place();

/// A socket that listens at a port that was free, and the numeric addresses where others may find
/// it, likelier ones first.
struct Door {
  Fd listener;
  int port = 0;
  std::vector<std::string> hosts = {};
};
/// `within`: the others are all in this network place, and only they may connect. Throws
/// BackendError.
Door open_door(bool within);

/// The same for ranks in this network place: a Unix socket in the abstract namespace, at the name
/// in `hosts`. It is faster than the loopback, whose segments of 64 KB are as long as TCP's first
/// peer buffer: then a sender waits for an acknowledgement that is delayed by 40 ms.
Door open_local_door(const std::string& name);
Address local_address(const std::string& name);

}  // namespace longspan::comm
