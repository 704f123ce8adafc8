#include "threads.h"

#include <algorithm>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace firsttoken {
namespace {

// Regions of one step follow each other within microseconds; a wait longer than this (some tens of
// microseconds) means that the step is over, or that a thread has lost its processor.
constexpr int kSpins = 4000;
// Of what is left, per thread: few shares at first, and single items in the end, so that all threads
// end together, and what a late one leaves can be taken.
constexpr int kShares = 2;

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

constexpr uint64_t kClosed = 0xFFFFFFFF;  // an item that no region has

constexpr uint32_t region_of(uint64_t ticket) { return static_cast<uint32_t>(ticket >> 32); }
constexpr uint32_t item_of(uint64_t ticket) { return static_cast<uint32_t>(ticket); }

struct ProcessPool {
  std::mutex mutex;
  std::unique_ptr<ThreadPool> pool;
};

ProcessPool& process_pool() {
  static ProcessPool* pool = new ProcessPool;  // never destroyed: its threads may outlive main
  return *pool;
}

}  // namespace

ThreadPool::ThreadPool(int num_threads) {
  for (int thread = 1; thread < num_threads; ++thread) {
    workers_.emplace_back([this, thread] { serve(thread); });
  }
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard<std::mutex> guard(mutex_);
    stopping_ = true;
  }
  work_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run(RunItems run_items, void* context, int64_t num_items) {
  const auto count = static_cast<uint32_t>(num_items);
  // Closed first: a thread that is late in the last region must not read the new count beside the
  // old ticket, and take from a region that is not open yet.
  const uint64_t last_ticket = ticket_.load(std::memory_order_relaxed);
  ticket_.store(last_ticket | kClosed);
  std::atomic_thread_fence(std::memory_order_release);
  run_items_.store(run_items, std::memory_order_relaxed);
  context_.store(context, std::memory_order_relaxed);
  num_items_.store(count, std::memory_order_relaxed);
  num_done_.store(0, std::memory_order_relaxed);
  const uint64_t region = region_of(last_ticket) + 1u;
  ticket_.store(region << 32);  // sequentially consistent, as is the count of sleepers
  if (num_sleeping_.load() > 0) {
    std::lock_guard<std::mutex> guard(mutex_);
    work_.notify_all();
  }

  while (take_items(0)) {
  }
  wait_until_done(count);
}

// Sleeps when it takes long: whoever holds the last items has lost its processor to another
// process, and can have ours.
void ThreadPool::wait_until_done(uint32_t num_items) {
  for (int spins = 0; spins < kSpins; ++spins) {
    if (num_done_.load(std::memory_order_acquire) == num_items) return;
    relax();
  }
  std::unique_lock<std::mutex> lock(mutex_);
  caller_sleeps_.store(true);
  done_.wait(lock, [&] { return num_done_.load() == num_items; });
  caller_sleeps_.store(false);
}

// Whether there was anything to take of the current region.
bool ThreadPool::take_items(int thread) {
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  while (true) {
    const RunItems run_items = run_items_.load(std::memory_order_relaxed);
    void* const context = context_.load(std::memory_order_relaxed);
    const uint32_t num_items = num_items_.load(std::memory_order_acquire);
    const uint32_t first = item_of(ticket);
    if (first >= num_items) return false;
    const auto shares = static_cast<uint32_t>(kShares * num_threads());
    const uint32_t last = first + std::max<uint32_t>(1, (num_items - first) / shares);
    const uint64_t next = (ticket & ~uint64_t{0xFFFFFFFF}) | last;
    if (ticket_.compare_exchange_weak(ticket, next, std::memory_order_acq_rel,
                                      std::memory_order_acquire)) {
      // Item `first` was free until now, so the region had not ended: the fields were its own.
      run_items(context, first, last, thread);
      const uint32_t num_done = num_done_.fetch_add(last - first) + (last - first);
      if (num_done == num_items && caller_sleeps_.load()) {
        std::lock_guard<std::mutex> guard(mutex_);
        done_.notify_one();
      }
      return true;
    }
  }
}

void ThreadPool::serve(int thread) {
  while (true) {
    const uint32_t region = region_of(ticket_.load(std::memory_order_acquire));
    while (take_items(thread)) {
    }
    if (!wait_for_work(region)) return;
  }
}

// Until there is a region after `seen_region`; false: the pool ends.
bool ThreadPool::wait_for_work(uint32_t seen_region) {
  for (int spins = 0; spins < kSpins; ++spins) {
    if (region_of(ticket_.load(std::memory_order_acquire)) != seen_region) return true;
    if (stopping_.load(std::memory_order_relaxed)) return false;
    relax();
  }
  std::unique_lock<std::mutex> lock(mutex_);
  num_sleeping_.fetch_add(1);
  work_.wait(lock, [&] { return stopping_.load() || region_of(ticket_.load()) != seen_region; });
  num_sleeping_.fetch_sub(1);
  return !stopping_.load();
}

PoolLease::PoolLease() : lock_(process_pool().mutex) {
  ProcessPool& process = process_pool();
  if (!process.pool) process.pool = std::make_unique<ThreadPool>(1);
  pool_ = process.pool.get();
}

}  // namespace firsttoken

extern "C" {

// From now on every call computes with so many threads; 1 until it is called.
void ft_set_num_threads(int num_threads) {
  using namespace firsttoken;
  ProcessPool& process = process_pool();
  std::lock_guard<std::mutex> guard(process.mutex);
  num_threads = std::clamp(num_threads, 1, ThreadPool::kMaxThreads);
  if (process.pool && process.pool->num_threads() == num_threads) return;
  process.pool.reset();
  process.pool = std::make_unique<ThreadPool>(num_threads);
}
}
