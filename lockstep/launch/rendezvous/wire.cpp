// SPDX-License-Identifier: Apache-2.0
#include "lockstep/launch/rendezvous/wire.h"

#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <type_traits>

#include "lockstep/core/error.h"
#include "lockstep/launch/rendezvous/hmac.h"

namespace lockstep::launch::wire {
namespace {

constexpr std::string_view kMagic = "LOCKSTEP";

template <class Number>
void append(std::string& bytes, Number number) {
  auto left = static_cast<std::make_unsigned_t<Number>>(number);
  for (size_t i = 0; i < sizeof left; ++i) {
    bytes += static_cast<char>(left & 0xff);
    if constexpr (sizeof left > 1) left >>= 8;
  }
}

// The caller has checked that enough bytes are there.
template <class Number>
Number take(std::string_view& bytes) {
  std::make_unsigned_t<Number> number = 0;
  for (size_t i = sizeof number; i-- > 0;) {
    number = static_cast<decltype(number)>((static_cast<uint64_t>(number) << 8) |
                                           static_cast<unsigned char>(bytes[i]));
  }
  bytes.remove_prefix(sizeof number);
  return static_cast<Number>(number);
}

}  // namespace

std::string pack(const Opening& opening) {
  check(opening.nonce.size() == kNonceSize, "a nonce has 32 bytes");
  std::string bytes(kMagic);
  append(bytes, kVersion);
  return bytes + opening.nonce + pack(opening.hello);
}

bool opening_begins(std::string_view bytes) {
  const size_t known = std::min(bytes.size(), kMagic.size());
  return bytes.substr(0, known) == kMagic.substr(0, known);
}

std::optional<Opening> unpack_opening(std::string_view bytes) {
  if (bytes.size() != kOpeningSize || !opening_begins(bytes)) return std::nullopt;
  bytes.remove_prefix(kMagic.size());
  if (take<uint32_t>(bytes) != kVersion) return std::nullopt;
  return Opening{std::string(bytes.substr(0, kNonceSize)),
                 unpack_hello(bytes.substr(kNonceSize)).value()};
}

std::string make_nonce() {
  std::string bytes(kNonceSize, '\0');
  // Up to 256 bytes come in one piece once the system has started.
  if (getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size()))
    throw SystemError("getrandom", errno);
  return bytes;
}

std::string client_proof(const std::string& token, const Opening& opening,
                         std::string_view server_nonce) {
  return hmac_sha256(token, "lockstep client" + pack(opening) + std::string(server_nonce));
}

std::string server_proof(const std::string& token, const Opening& opening,
                         std::string_view server_nonce, int64_t incarnation) {
  return hmac_sha256(
      token, "lockstep server" + pack(opening) + std::string(server_nonce) + pack(incarnation));
}

bool same_bytes(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;
  unsigned difference = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference |= static_cast<unsigned char>(a[i]) ^ static_cast<unsigned char>(b[i]);
  }
  return difference == 0;
}

std::string frame(const Request& request) {
  std::string bytes;
  bytes.reserve(9 + request.key.size() + request.value.size());
  append(bytes, static_cast<uint32_t>(5 + request.key.size() + request.value.size()));
  append(bytes, static_cast<uint8_t>(request.op));
  append(bytes, static_cast<uint32_t>(request.key.size()));
  return bytes.append(request.key).append(request.value);
}

std::string frame(const Reply& reply) {
  std::string bytes;
  bytes.reserve(5 + reply.value.size());
  append(bytes, static_cast<uint32_t>(1 + reply.value.size()));
  append(bytes, static_cast<uint8_t>(reply.status));
  return bytes.append(reply.value);
}

std::optional<uint32_t> frame_length(std::string_view bytes) {
  if (bytes.size() < 4) return std::nullopt;
  return take<uint32_t>(bytes);
}

std::optional<Request> parse_request(std::string_view payload) {
  if (payload.size() < 5) return std::nullopt;
  const auto op = take<uint8_t>(payload);
  const auto key_size = take<uint32_t>(payload);
  if (op < static_cast<uint8_t>(Op::set) || op > static_cast<uint8_t>(Op::goodbye)) {
    return std::nullopt;
  }
  if (key_size > kMaxKey || key_size > payload.size()) return std::nullopt;
  if (payload.size() - key_size > kMaxValue) return std::nullopt;
  return Request{static_cast<Op>(op), std::string(payload.substr(0, key_size)),
                 std::string(payload.substr(key_size))};
}

std::optional<Reply> parse_reply(std::string_view payload) {
  if (payload.empty()) return std::nullopt;
  const auto status = take<uint8_t>(payload);
  if (status < static_cast<uint8_t>(Status::ok) || status > static_cast<uint8_t>(Status::later)) {
    return std::nullopt;
  }
  return Reply{static_cast<Status>(status), std::string(payload)};
}

std::string pack(const Hello& hello) {
  std::string bytes;
  append(bytes, hello.rank);
  append(bytes, hello.world_size);
  append(bytes, hello.generation);
  append(bytes, hello.incarnation);
  return bytes;
}

std::optional<Hello> unpack_hello(std::string_view bytes) {
  if (bytes.size() != kHelloSize) return std::nullopt;
  Hello hello;
  hello.rank = take<int32_t>(bytes);
  hello.world_size = take<int32_t>(bytes);
  hello.generation = take<int64_t>(bytes);
  hello.incarnation = take<int64_t>(bytes);
  return hello;
}

std::string pack(int64_t number) {
  std::string bytes;
  append(bytes, number);
  return bytes;
}

std::optional<int64_t> unpack_number(std::string_view bytes) {
  if (bytes.size() != 8) return std::nullopt;
  return take<int64_t>(bytes);
}

}  // namespace lockstep::launch::wire
