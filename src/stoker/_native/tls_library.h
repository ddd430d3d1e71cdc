// What is used of OpenSSL, 3 or 1.1, found when it is needed. Names and types are those of its headers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace stoker {

struct TlsLibrary {
  const void* (*TLS_server_method)();
  void* (*SSL_CTX_new)(const void* method);
  void (*SSL_CTX_free)(void* context);
  long (*SSL_CTX_ctrl)(void* context, int command, long number, void* pointer);
  uint64_t (*SSL_CTX_set_options)(void* context, uint64_t options);
  void (*SSL_CTX_set_default_passwd_cb)(void* context, int (*callback)(char*, int, int, void*));
  int (*SSL_CTX_use_certificate_chain_file)(void* context, const char* file);
  int (*SSL_CTX_use_PrivateKey_file)(void* context, const char* file, int type);
  int (*SSL_CTX_check_private_key)(const void* context);
  int (*SSL_CTX_load_verify_locations)(void* context, const char* file, const char* folder);
  void* (*SSL_load_client_CA_file)(const char* file);
  void (*SSL_CTX_set_client_CA_list)(void* context, void* names);
  void (*SSL_CTX_set_verify)(void* context, int mode, int (*callback)(int, void*));
  int (*SSL_CTX_set_session_id_context)(void* context, const unsigned char* bytes, unsigned int size);
  void (*SSL_CTX_set_alpn_select_cb)(void* context,
                                     int (*callback)(void*, const unsigned char**, unsigned char*, const unsigned char*,
                                                     unsigned int, void*),
                                     void* argument);
  int (*SSL_select_next_proto)(unsigned char** chosen, unsigned char* size, const unsigned char* ours,
                               unsigned int ours_size, const unsigned char* theirs, unsigned int theirs_size);
  void* (*SSL_new)(void* context);
  void (*SSL_free)(void* session);
  int (*SSL_set_fd)(void* session, int fd);
  void (*SSL_set_accept_state)(void* session);
  int (*SSL_read)(void* session, void* bytes, int size);
  int (*SSL_write)(void* session, const void* bytes, int size);
  int (*SSL_shutdown)(void* session);
  int (*SSL_get_error)(const void* session, int result);
  int (*SSL_is_init_finished)(const void* session);
  long (*SSL_get_verify_result)(const void* session);

  unsigned long (*ERR_get_error)();
  unsigned long (*ERR_peek_last_error)();
  void (*ERR_clear_error)();
  void (*ERR_error_string_n)(unsigned long error, char* text, size_t size);

  void (*X509_free)(void* certificate);
  void* (*X509_get_ext_d2i)(const void* certificate, int kind, int* is_critical, int* at);
  void* (*X509_get_subject_name)(const void* certificate);
  int (*X509_NAME_get_index_by_NID)(const void* name, int kind, int after);
  void* (*X509_NAME_get_entry)(const void* name, int at);
  void* (*X509_NAME_ENTRY_get_data)(const void* entry);
  int (*OPENSSL_sk_num)(const void* stack);
  void* (*OPENSSL_sk_value)(const void* stack, int at);
  void* (*GENERAL_NAME_get0_value)(const void* name, int* kind);
  void (*GENERAL_NAMES_free)(void* names);
  int (*ASN1_STRING_length)(const void* text);
  const unsigned char* (*ASN1_STRING_get0_data)(const void* text);
  int (*ASN1_STRING_to_UTF8)(unsigned char** bytes, const void* text);
  void (*CRYPTO_free)(void* bytes, const char* file, int line);
  // Named otherwise in 3 and in 1.1.
  void* (*SSL_get1_peer_certificate)(const void* session);

  // Looked for once. Throws TlsProblem where it is not there.
  static const TlsLibrary& get();
};

}  // namespace stoker
