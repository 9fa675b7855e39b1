// SPDX-License-Identifier: Apache-2.0
// Ranks for fabric tests: threads of one process, on a private board (as the thread backend has) or
// on a shared one with a heap for each (as the shm backend has).
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/fabric/engine.h"

namespace lockstep::fabric::testing {

enum class Memory { threads, shared };

struct Member {
  Engine& engine;
  SharedHeap* heap;  // null among threads
  int rank, size;

  void run(Operation operation) { engine.wait(*engine.submit(std::move(operation), nullptr)); }
};

// Runs `body` for each rank; returns what each threw, or null.
inline std::vector<std::exception_ptr> run_ranks(Memory memory, int size,
                                                 const std::function<void(Member&)>& body,
                                                 const EngineOptions& options = {}) {
  const bool shared = memory == Memory::shared;
  const std::shared_ptr<Board> board = Board::create(size, shared);
  std::vector<std::exception_ptr> errors(static_cast<size_t>(size));
  {
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < size; ++rank) {
      threads.emplace_back([&, rank] {
        try {
          const auto view = shared ? Board::open(board->handle(), size, 0)
                                   : board;  // its own mapping, as in a process
          const auto heap = shared ? std::make_shared<SharedHeap>() : nullptr;
          const auto peers = shared ? std::make_shared<PeerHeaps>() : nullptr;
          Engine engine(Seat(view, rank, "test", heap, peers), options);
          Member member{engine, heap.get(), rank, size};
          body(member);
        } catch (...) {
          errors[static_cast<size_t>(rank)] = std::current_exception();
        }
      });
    }
  }
  return errors;
}

inline std::string what(const std::exception_ptr& error) {
  if (!error) return "";
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  }
}

template <class Exception>
bool is(const std::exception_ptr& error) {
  if (!error) return false;
  try {
    std::rethrow_exception(error);
  } catch (const Exception&) {
    return true;
  } catch (...) {
    return false;
  }
}

template <class T>
std::span<std::byte> bytes(std::vector<T>& values) {
  return std::as_writable_bytes(std::span(values));
}

}  // namespace lockstep::fabric::testing
