// SPDX-License-Identifier: Apache-2.0
// A backend whose operations are given up while they run: it keeps what it would still use.
#pragma once

#include <vector>

#include "lockstep/comm/backend.h"
#include "lockstep/core/error.h"

namespace lockstep::comm::test {

class UnfinishedGroup final : public detail::GroupImpl {
 public:
  struct Used {
    fabric::Operation operation;
    std::shared_ptr<const void> memory;
  };
  UnfinishedGroup(detail::Membership membership, std::vector<Used>& used)
      : GroupImpl(std::move(membership), "unfinished"), used_(used) {}

  std::shared_ptr<detail::Pending> submit(fabric::Operation operation,
                                          std::shared_ptr<const void> memory) override {
    struct Unfinished final : detail::Pending {
      void wait() override { throw TimeoutError("given up"); }
      bool done() const override { return false; }
    };
    used_.push_back({std::move(operation), std::move(memory)});
    return std::make_shared<Unfinished>();
  }
  std::shared_ptr<std::byte> allocate(size_t) override { return nullptr; }
  bool reaches(const void*, size_t) const override { return false; }

 private:
  std::vector<Used>& used_;
};

}  // namespace lockstep::comm::test
