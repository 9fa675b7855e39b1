// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace lockstep::memory {

// Pins whole pages that belong to another owner, for as long as it lives: a GPU writes them itself.
class PinnedPages {
 public:
  explicit PinnedPages(std::span<std::byte> pages);
  ~PinnedPages();
  PinnedPages(const PinnedPages&) = delete;
  PinnedPages& operator=(const PinnedPages&) = delete;

  // Why they are not pinned; empty where they are.
  const std::string& refusal() const { return refusal_; }

 private:
  std::span<std::byte> pages_;
  std::string refusal_;
};

}  // namespace lockstep::memory
