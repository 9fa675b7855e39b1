// SPDX-License-Identifier: Apache-2.0
// The same function where only OpenSSL's library is installed, without its headers: two of its
// functions, whose declarations have not changed since 1.1, looked up by name.
#include <dlfcn.h>

#include <cerrno>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/launch/rendezvous/hmac.h"

namespace lockstep::launch {
namespace {

using Sha256 = const void* (*)();
using Hmac = unsigned char* (*)(const void*, const void*, int, const unsigned char*, size_t,
                                unsigned char*, unsigned int*);

std::pair<Sha256, Hmac> load() {
  for (const char* name : {"libcrypto.so.3", "libcrypto.so.1.1"}) {
    void* const library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) continue;
    const auto sha256 = reinterpret_cast<Sha256>(dlsym(library, "EVP_sha256"));
    const auto hmac = reinterpret_cast<Hmac>(dlsym(library, "HMAC"));
    if (sha256 != nullptr && hmac != nullptr) return {sha256, hmac};
  }
  throw SystemError("OpenSSL's libcrypto.so.3 cannot be loaded; install libssl3", ENOENT);
}

}  // namespace

std::string hmac_sha256(std::string_view key, std::string_view text) {
  static const auto [sha256, hmac] = load();
  std::string code(kHmacSize, '\0');
  unsigned int size = 0;
  const auto* made = hmac(sha256(), key.empty() ? "" : key.data(), static_cast<int>(key.size()),
                          reinterpret_cast<const unsigned char*>(text.data()), text.size(),
                          reinterpret_cast<unsigned char*>(code.data()), &size);
  if (made == nullptr || size != kHmacSize)
    throw SystemError("OpenSSL refuses to compute HMAC-SHA256", EINVAL);
  return code;
}

}  // namespace lockstep::launch
