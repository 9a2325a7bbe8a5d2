// A port for ranks to meet at.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <random>

namespace longspan::tests {

/// A port of the loopback interface that was free a moment ago. It is below the ports that Linux
/// assigns to connections: one of those could be taken meanwhile.
inline int free_port() {
  std::random_device random;
  std::uniform_int_distribution<int> ports(10000, 32000);
  for (;;) {
    const int port = ports(random);
    sockaddr_in here{};
    here.sin_family = AF_INET;
    here.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    here.sin_port = htons(static_cast<std::uint16_t>(port));
    const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
    const bool is_free = ::bind(fd, reinterpret_cast<const sockaddr*>(&here), sizeof here) == 0;
    ::close(fd);
    if (is_free) return port;
  }
}

}  // namespace longspan::tests
