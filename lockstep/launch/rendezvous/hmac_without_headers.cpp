// SPDX-License-Identifier: Apache-2.0
// The same functions where only OpenSSL's library is installed, without its headers: three of its
// functions, whose declarations have not changed since 1.1, looked up by name.
#include <dlfcn.h>

#include <cerrno>

#include "lockstep/core/error.h"
#include "lockstep/launch/rendezvous/hmac.h"

namespace lockstep::launch {
namespace {

using Sha256 = const void* (*)();
using Hmac = unsigned char* (*)(const void*, const void*, int, const unsigned char*, size_t,
                                unsigned char*, unsigned int*);

using Digest = int (*)(const void*, size_t, unsigned char*, unsigned int*, const void*, void*);

struct Library {
  Sha256 sha256 = nullptr;
  Hmac hmac = nullptr;
  Digest digest = nullptr;
};

const Library& library() {
  static const Library loaded = [] {
    for (const char* name : {"libcrypto.so.3", "libcrypto.so.1.1"}) {
      void* const file = dlopen(name, RTLD_NOW | RTLD_LOCAL);
      if (file == nullptr) continue;
      const Library found{reinterpret_cast<Sha256>(dlsym(file, "EVP_sha256")),
                          reinterpret_cast<Hmac>(dlsym(file, "HMAC")),
                          reinterpret_cast<Digest>(dlsym(file, "EVP_Digest"))};
      if (found.sha256 != nullptr && found.hmac != nullptr && found.digest != nullptr) return found;
    }
    throw SystemError("OpenSSL's libcrypto.so.3 cannot be loaded; install libssl3", ENOENT);
  }();
  return loaded;
}

}  // namespace

std::string hmac_sha256(std::string_view key, std::string_view text) {
  std::string code(kHmacSize, '\0');
  unsigned int size = 0;
  const auto* made = library().hmac(
      library().sha256(), key.empty() ? "" : key.data(), static_cast<int>(key.size()),
      reinterpret_cast<const unsigned char*>(text.data()), text.size(),
      reinterpret_cast<unsigned char*>(code.data()), &size);
  if (made == nullptr || size != kHmacSize)
    throw SystemError("OpenSSL refuses to compute HMAC-SHA256", EINVAL);
  return code;
}

std::string sha256(std::string_view text) {
  std::string hash(kSha256Size, '\0');
  if (library().digest(text.data(), text.size(), reinterpret_cast<unsigned char*>(hash.data()),
                       nullptr, library().sha256(), nullptr) != 1)
    throw SystemError("OpenSSL refuses to compute SHA-256", EINVAL);
  return hash;
}

}  // namespace lockstep::launch
