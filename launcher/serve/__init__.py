"""The service: a queue for shared servers, an API, a page. Nobody else imports starlette and uvicorn."""
