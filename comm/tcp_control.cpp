#include "comm/tcp_control.hpp"
#include "longspan/error.hpp"
namespace longspan::comm {
std::unique_ptr<Control> tcp_control(const Launch&, milliseconds) { throw Unsupported("not yet"); }
}  // namespace longspan::comm
