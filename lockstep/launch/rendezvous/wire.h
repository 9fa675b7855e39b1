// SPDX-License-Identifier: Apache-2.0
// What rendezvous clients and servers say to each other. All numbers are little-endian.
//
// The token is never sent. A connection opens with
//   client: an opening of fixed size: magic, version, a random number, and who it is (Hello)
//   server: a reply with a random number of its own
//   client: proof that it knows the token, made from all of that
//   server: a reply: the incarnation that the client has joined, and proof that it knows the token
// and nothing else is read before the client's proof is good. Then come frames: a 4-byte length and
// that many bytes. Requests and replies alternate, one at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace lockstep::launch::wire {

constexpr uint32_t kVersion = 2;
constexpr size_t kMaxToken = 128;
constexpr size_t kNonceSize = 32;
constexpr size_t kHelloSize = 4 + 4 + 8 + 8;
constexpr size_t kOpeningSize = 8 + 4 + kNonceSize + kHelloSize;
constexpr size_t kMaxKey = 4u << 10;
constexpr size_t kMaxValue = 16u << 20;
constexpr size_t kMaxFrame = 1 + 4 + kMaxKey + kMaxValue;

enum class Op : uint8_t { set = 1, get, find, add, remove, goodbye };
enum class Status : uint8_t { ok = 1, absent, refused, later };

struct Request {
  Op op = Op::find;
  std::string key;
  std::string value;
};

struct Reply {
  Status status = Status::ok;
  std::string value;  // for `refused` and `later`, the reason in words
};

// The answer to a rank's hello is the number of the incarnation that it has joined; a client that
// is not a rank says which one it wants.
struct Hello {
  int32_t rank = -1;
  int32_t world_size = 0;
  int64_t generation = 0;
  int64_t incarnation = 0;
};

struct Opening {
  std::string nonce;
  Hello hello;
};
std::string pack(const Opening& opening);
// True when the first bytes can still become an opening of this protocol, of any version.
bool opening_begins(std::string_view bytes);
// Nothing where it is of another version.
std::optional<Opening> unpack_opening(std::string_view bytes);
// Fresh random bytes.
std::string make_nonce();
// Both sides can make both proofs from what was said; only holders of the token can.
std::string client_proof(const std::string& token, const Opening& opening,
                         std::string_view server_nonce);
std::string server_proof(const std::string& token, const Opening& opening,
                         std::string_view server_nonce, int64_t incarnation);
// Takes the same time whatever the bytes are.
bool same_bytes(std::string_view a, std::string_view b);

// Whole frames, length included.
std::string frame(const Request& request);
std::string frame(const Reply& reply);

// The length in a frame's first 4 bytes; nothing if there are fewer.
std::optional<uint32_t> frame_length(std::string_view bytes);

// Read what follows the length. Nothing where the bytes break the rules above.
std::optional<Request> parse_request(std::string_view payload);
std::optional<Reply> parse_reply(std::string_view payload);

std::string pack(const Hello& hello);
std::optional<Hello> unpack_hello(std::string_view bytes);
std::string pack(int64_t number);
std::optional<int64_t> unpack_number(std::string_view bytes);

}  // namespace lockstep::launch::wire
