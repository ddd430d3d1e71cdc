// TLS for the front: a server's certificate, and what each connection has agreed on. OpenSSL is looked for when the first
// certificate is loaded, so that nothing of it is needed to build or to serve without TLS.
#pragma once

#include <sys/types.h>

#include <memory>
#include <stdexcept>
#include <string>

namespace stoker {

struct TlsProblem : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Of one connection; not for two threads at once. `read` and `write` are as recv and send on a socket that does not block:
// -1 with EAGAIN where the peer is waited for, in either direction. The first of them begins the handshake.
class TlsSession {
 public:
  TlsSession(void* session) : session_(session) {}
  ~TlsSession();
  TlsSession(const TlsSession&) = delete;

  ssize_t read(char* bytes, size_t size);
  // At most RECORD_BYTES are taken. After EAGAIN the same is to be written next, `begun_bytes` of it at least; any other
  // failure is EPIPE.
  ssize_t write(const char* bytes, size_t size);
  size_t begun_bytes() const { return begun_bytes_; }
  // The handshake is over.
  bool is_open() const { return is_open_; }
  // The peer speaks plain HTTP. Nothing was said to it.
  bool met_plaintext() const { return met_plaintext_; }
  // Who the peer has proved to be, by a certificate: `URI:…`, else `DNS:…`, else `CN:…`; empty: it has shown none.
  const std::string& peer() const { return peer_; }
  // Tells the peer that nothing more comes. False where there is no room for that yet: to be called again.
  bool end();

  static constexpr size_t RECORD_BYTES = 16 * 1024;

 private:
  ssize_t result(int done);
  void open();

  void* const session_;
  size_t begun_bytes_ = 0;
  bool is_open_ = false;
  bool is_broken_ = false;
  bool met_plaintext_ = false;
  std::string peer_;
};

// A server's certificate and key, as files in PEM. It never changes: a renewed certificate is another context.
class TlsContext {
 public:
  // `client_ca`: who signs the certificates of peers, where there are such; empty: none is asked for. Who shows none is let
  // in unless it `is_client_required`. Throws TlsProblem.
  TlsContext(const std::string& certificate, const std::string& key, const std::string& client_ca,
             bool is_client_required = false);
  ~TlsContext();
  TlsContext(const TlsContext&) = delete;

  // Nothing where there is no memory. The socket stays the caller's.
  std::unique_ptr<TlsSession> accept(int socket) const;

 private:
  void* context_;
};

}  // namespace stoker
