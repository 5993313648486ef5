// Command kms is a KMS plug-in for the tests, with the server of Kubernetes' own module k8s.io/kms.
//
// It stands for a cloud's KMS: it seals with AES-GCM by the keys of the variable KMS_KEYS, `id=<32
// bytes in base64>`, separated by commas. The first key seals; all open.
package main

import (
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"encoding/base64"
	"fmt"
	"log"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"k8s.io/kms/pkg/service"
)

// nonceAnnotation has the nonce, so that annotations are of use.
const nonceAnnotation = "nonce.kms.torpor.dev"

type keys struct {
	newest string
	byID   map[string]cipher.AEAD
}

func parse(text string) (*keys, error) {
	parsed := &keys{byID: map[string]cipher.AEAD{}}
	for _, line := range strings.Split(text, ",") {
		id, encoded, _ := strings.Cut(line, "=")
		key, err := base64.StdEncoding.DecodeString(encoded)
		if err != nil {
			return nil, fmt.Errorf("key %q: %w", id, err)
		}
		block, err := aes.NewCipher(key)
		if err != nil {
			return nil, fmt.Errorf("key %q: %w", id, err)
		}
		if parsed.byID[id], err = cipher.NewGCM(block); err != nil {
			return nil, fmt.Errorf("key %q: %w", id, err)
		}
		if parsed.newest == "" {
			parsed.newest = id
		}
	}
	return parsed, nil
}

func (k *keys) Status(context.Context) (*service.StatusResponse, error) {
	return &service.StatusResponse{Version: "v2", Healthz: "ok", KeyID: k.newest}, nil
}

func (k *keys) Encrypt(_ context.Context, uid string, data []byte) (*service.EncryptResponse, error) {
	log.Printf("Encrypt %s with key %s", uid, k.newest)
	key := k.byID[k.newest]
	nonce := make([]byte, key.NonceSize())
	if _, err := rand.Read(nonce); err != nil {
		return nil, err
	}
	return &service.EncryptResponse{
		Ciphertext:  key.Seal(nil, nonce, data, nil),
		KeyID:       k.newest,
		Annotations: map[string][]byte{nonceAnnotation: nonce},
	}, nil
}

func (k *keys) Decrypt(_ context.Context, uid string, request *service.DecryptRequest) ([]byte, error) {
	log.Printf("Decrypt %s with key %s", uid, request.KeyID)
	key, nonce := k.byID[request.KeyID], request.Annotations[nonceAnnotation]
	if key == nil {
		return nil, fmt.Errorf("there is no key %q", request.KeyID)
	}
	if len(nonce) != key.NonceSize() {
		return nil, fmt.Errorf("there is no nonce")
	}
	return key.Open(nil, nonce, request.Ciphertext, nil)
}

func main() {
	if len(os.Args) != 2 {
		log.Fatal("usage: kms SOCKET, with KMS_KEYS=<id>=<key>,… in the environment")
	}
	keys, err := parse(os.Getenv("KMS_KEYS"))
	if err != nil {
		log.Fatal(err)
	}
	os.Remove(os.Args[1])
	server := service.NewGRPCService(os.Args[1], 3*time.Second, keys)
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGTERM, syscall.SIGINT)
	go func() {
		<-ended
		server.Shutdown()
	}()
	log.Printf("serves %s", os.Args[1])
	if err := server.ListenAndServe(); err != nil {
		log.Fatal(err)
	}
}
