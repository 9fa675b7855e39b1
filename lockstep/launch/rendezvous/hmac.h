// SPDX-License-Identifier: Apache-2.0
// HMAC-SHA256 and SHA-256, by OpenSSL's libcrypto.
#pragma once

#include <string>
#include <string_view>

namespace lockstep::launch {

constexpr size_t kHmacSize = 32;
constexpr size_t kSha256Size = 32;

// 32 bytes that only a holder of the key can make from this text. Throws SystemError where the
// library cannot be used.
std::string hmac_sha256(std::string_view key, std::string_view text);
// The 32 bytes of the hash. Throws as above.
std::string sha256(std::string_view text);

}  // namespace lockstep::launch
