// SPDX-License-Identifier: Apache-2.0
#include "lockstep/launch/rendezvous/hmac.h"

#include <openssl/evp.h>
#include <openssl/hmac.h>

#include <cerrno>

#include "lockstep/core/error.h"

namespace lockstep::launch {

std::string hmac_sha256(std::string_view key, std::string_view text) {
  std::string code(kHmacSize, '\0');
  unsigned int size = 0;
  const auto* made = HMAC(EVP_sha256(), key.empty() ? "" : key.data(), static_cast<int>(key.size()),
                          reinterpret_cast<const unsigned char*>(text.data()), text.size(),
                          reinterpret_cast<unsigned char*>(code.data()), &size);
  if (made == nullptr || size != kHmacSize)
    throw SystemError("OpenSSL refuses to compute HMAC-SHA256", EINVAL);
  return code;
}

std::string sha256(std::string_view text) {
  std::string hash(kSha256Size, '\0');
  if (EVP_Digest(text.data(), text.size(), reinterpret_cast<unsigned char*>(hash.data()), nullptr,
                 EVP_sha256(), nullptr) != 1)
    throw SystemError("OpenSSL refuses to compute SHA-256", EINVAL);
  return hash;
}

}  // namespace lockstep::launch
