// SPDX-License-Identifier: Apache-2.0
// Our rendezvous in the shape that c10d wants.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>
#include <string>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/launch/rendezvous/store.h"

namespace lockstep::comm::gloo {

// Does not keep the store: a rank leaves the rendezvous when its groups are gone, not when Gloo
// has returned from a connection that was given up.
class StoreAdapter final : public c10d::Store {
 public:
  StoreAdapter(std::weak_ptr<launch::Store> store, std::string prefix, milliseconds timeout)
      : c10d::Store(timeout), store_(std::move(store)), prefix_(std::move(prefix)) {}

  // An override from 2.10 on; earlier releases do not have it.
  c10::intrusive_ptr<c10d::Store> clone() {
    return c10::make_intrusive<StoreAdapter>(store_, prefix_, timeout_);
  }

  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    store()->set(prefix_ + key, {value.begin(), value.end()});
  }
  std::vector<uint8_t> get(const std::string& key) override {
    const std::string value = store()->get(prefix_ + key, Deadline(timeout_));
    return {value.begin(), value.end()};
  }
  int64_t add(const std::string& key, int64_t value) override {
    return store()->add(prefix_ + key, value);
  }
  bool deleteKey(const std::string& key) override { return store()->remove(prefix_ + key); }
  bool check(const std::vector<std::string>& keys) override {
    for (const auto& key : keys) {
      if (!store()->find(prefix_ + key)) return false;
    }
    return true;
  }
  int64_t getNumKeys() override { return -1; }  // "not known", as c10d's file store may answer
  void wait(const std::vector<std::string>& keys) override { wait(keys, timeout_); }
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override {
    const Deadline deadline(timeout);
    for (const auto& key : keys) store()->get(prefix_ + key, deadline);
  }

 private:
  std::shared_ptr<launch::Store> store() const {
    auto store = store_.lock();
    if (!store) throw CommError("the group is gone");
    return store;
  }

  std::weak_ptr<launch::Store> store_;
  std::string prefix_;
};

}  // namespace lockstep::comm::gloo
