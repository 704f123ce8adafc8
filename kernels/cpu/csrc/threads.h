// The one pool of compute threads.
//
// A parallel region is a count of items that any thread may take; it ends when all items are done,
// not when all threads have come by: a thread that the system is slow to wake, or has taken off its
// processor, delays nothing but the item that it holds. What an item computes may not depend on the
// thread that computes it, so results are the same for any number of threads.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace firsttoken {

class ThreadPool {
 public:
  static constexpr int kMaxThreads = 256;

  // Counts the caller of `for_each`: num_threads - 1 are started.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

  // body(item, thread) once for each item of [0, num_items), thread in [0, num_threads).
  // Neighbouring items mostly go to one thread. Returns when all are done. One caller at a time.
  template <class Body>
  void for_each(int64_t num_items, Body&& body) {
    if (num_items <= 1 || workers_.empty()) {
      for (int64_t item = 0; item < num_items; ++item) body(item, 0);
      return;
    }
    using Plain = std::remove_reference_t<Body>;
    run(
        [](void* context, int64_t first, int64_t last, int thread) {
          Plain& body = *static_cast<Plain*>(context);
          for (int64_t item = first; item < last; ++item) body(item, thread);
        },
        const_cast<void*>(static_cast<const void*>(&body)), num_items);
  }

 private:
  using RunItems = void (*)(void* context, int64_t first, int64_t last, int thread);

  void run(RunItems run_items, void* context, int64_t num_items);
  void wait_until_done(uint32_t num_items);
  bool take_items(int thread);
  void serve(int thread);
  bool wait_for_work(uint32_t seen_region);

  // The region's number in the high half, its next item in the low one: items are taken by
  // compare-and-swap, which fails for whoever read the fields below of a region that has ended.
  std::atomic<uint64_t> ticket_{0};
  std::atomic<RunItems> run_items_{nullptr};
  std::atomic<void*> context_{nullptr};
  std::atomic<uint32_t> num_items_{0};
  alignas(64) std::atomic<uint32_t> num_done_{0};

  alignas(64) std::atomic<int> num_sleeping_{0};
  std::atomic<bool> caller_sleeps_{false};
  std::atomic<bool> stopping_{false};
  std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable done_;
  std::vector<std::thread> workers_;
};

// The process's pool, held for the length of one call of the library; calls from several threads
// take turns.
class PoolLease {
 public:
  PoolLease();
  ThreadPool& operator*() const { return *pool_; }

 private:
  std::unique_lock<std::mutex> lock_;
  ThreadPool* pool_;
};

}  // namespace firsttoken
