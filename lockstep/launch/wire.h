// What rendezvous clients and servers say to each other. All numbers are little-endian.
//
// A connection opens with one greeting of fixed size that holds the token; nothing else is read
// before it is checked. Then come frames: a 4-byte length and that many bytes. Requests and replies
// alternate, one at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace lockstep::launch::wire {

constexpr uint32_t kVersion = 1;
constexpr size_t kMaxToken = 128;
constexpr size_t kGreetingSize =
    8 + 4 + 4 + kMaxToken;  // magic, version, token length, padded token
constexpr size_t kMaxKey = 4u << 10;
constexpr size_t kMaxValue = 16u << 20;
constexpr size_t kMaxFrame = 1 + 4 + kMaxKey + kMaxValue;
constexpr size_t kMaxHelloFrame = 64;

enum class Op : uint8_t { hello = 1, set, get, find, add, remove, goodbye };
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

std::string greeting(std::string_view token);
// True when the first bytes can still become a greeting of this protocol.
bool greeting_begins(std::string_view bytes);
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
